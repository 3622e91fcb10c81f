from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0002_rules.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0001_initial")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
