from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0022_continuing.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0021_ending"),
    ]

    operations = [
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
