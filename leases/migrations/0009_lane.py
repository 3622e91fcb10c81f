from pathlib import Path

from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0009_lane.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0008_holds")]

    operations = [
        migrations.RemoveIndex(model_name="obligation", name="obligation_due"),
        migrations.AddIndex(
            model_name="obligation",
            index=models.Index(
                condition=models.Q(("due_at__isnull", False), models.Q(("kind", "verify_end"), _negated=True)),
                fields=["account", "due_at"],
                name="obligation_due",
            ),
        ),
        migrations.AddIndex(
            model_name="obligation",
            index=models.Index(
                condition=models.Q(("due_at__isnull", False), ("kind", "verify_end")),
                fields=["account", "due_at"],
                name="obligation_verified",
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
