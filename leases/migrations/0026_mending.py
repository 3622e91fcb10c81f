from pathlib import Path

from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0026_mending.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0025_operating")]

    operations = [
        migrations.AddField(
            model_name="recovery",
            name="workspace",
            field=models.CharField(
                blank=True,
                default="",
                help_text="The directory to save; empty: as the lease recorded it.",
                max_length=1000,
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
