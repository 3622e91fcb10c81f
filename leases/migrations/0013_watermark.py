from pathlib import Path

from django.db import migrations, models
from django.db.models import Q

SQL = (Path(__file__).parent / "sql" / "0013_watermark.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0012_prune")]

    operations = [
        migrations.AddField(
            model_name="installation",
            name="watermark_generation",
            field=models.PositiveBigIntegerField(
                db_default=0,
                default=0,
                editable=False,
                help_text="When a person last said to trust this database, in seconds since 1970; 0: never.",
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="watermark_identity",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                editable=False,
                help_text="The server's system identifier, and the database's oid.",
                max_length=60,
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="watermark_timeline",
            field=models.BigIntegerField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="installation",
            name="watermark_position",
            field=models.BigIntegerField(
                blank=True,
                editable=False,
                help_text="Bytes of write-ahead log, as of the beat's last look.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="watermark_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="installation",
            name="watermark_outside",
            field=models.BooleanField(
                db_default=False,
                default=False,
                editable=False,
                help_text="The mark was once kept outside too, so its absence there is telling.",
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="judged_server",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                editable=False,
                help_text="The start of the server that was last judged as ours.",
                max_length=120,
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="observing_since",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="installation",
            name="observing_why",
            field=models.CharField(
                blank=True,
                choices=[
                    ("behind", "an older state of this database was restored"),
                    ("another_server", "this is not the server, or the database, that the mark was made in"),
                    ("marks_lost", "no mark is left outside this database, and its server was started anew"),
                ],
                db_default="",
                default="",
                editable=False,
                max_length=20,
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="observed_mark_at",
            field=models.DateTimeField(
                blank=True,
                editable=False,
                help_text="What was released after it may be torn down while observing.",
                null=True,
            ),
        ),
        migrations.AlterField(
            model_name="obligation",
            name="closed_as",
            field=models.CharField(
                blank=True,
                choices=[
                    ("proven", "a receipt proves it"),
                    ("unverified", "an operator ended the retries; the debt stays visible"),
                    ("handed_over", "another obligation took it over"),
                    ("nothing_owed", "nothing was owed any more"),
                    ("disowned", "its sandbox is that of the installation which this database is a clone of"),
                ],
                max_length=20,
            ),
        ),
        migrations.AddConstraint(
            model_name="installation",
            constraint=models.CheckConstraint(
                condition=Q(observing_since__isnull=True, observed_mark_at__isnull=True, observing_why="")
                | Q(observing_since__isnull=False, observed_mark_at__isnull=False) & ~Q(observing_why=""),
                name="installation_observes_for_a_reason",
            ),
        ),
        migrations.AddConstraint(
            model_name="installation",
            constraint=models.CheckConstraint(
                condition=Q(watermark_position__isnull=True, watermark_at__isnull=True, watermark_timeline__isnull=True)
                | Q(watermark_position__isnull=False, watermark_at__isnull=False, watermark_timeline__isnull=False),
                name="installation_watermark_is_whole",
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
