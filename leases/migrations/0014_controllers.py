from pathlib import Path

from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0014_controllers.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0013_watermark")]

    operations = [
        migrations.AddField(
            model_name="installation",
            name="lapse_asked_at",
            field=models.DateTimeField(
                blank=True,
                editable=False,
                help_text=(
                    "Since when a person is asked why so many controllers lapsed at once; meanwhile none is settled."
                ),
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="lapse_answered_at",
            field=models.DateTimeField(
                blank=True, editable=False, help_text="When a person last said what a mass lapse was.", null=True
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="controller_gave_up_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When the controller gave the run up: another may take it before the hold ends.",
                null=True,
            ),
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(
                condition=models.Q(("controller_expires_at__isnull", False), ("status", "interrupted")),
                fields=["finished_at"],
                name="run_lapsed",
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
