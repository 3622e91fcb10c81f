from pathlib import Path

from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0007_facts_that_end.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0006_startup_wakes")]

    operations = [
        migrations.AddIndex(
            model_name="operation",
            index=models.Index(
                condition=models.Q(("resource_id", ""), _negated=True),
                fields=["account", "resource_id"],
                name="operation_of_sandbox",
            ),
        ),
        migrations.AlterField(
            model_name="operation",
            name="call_ended_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When it was known that nothing its caller asked for can still be done.",
                null=True,
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
