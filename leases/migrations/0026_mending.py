from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0026_mending.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0025_operating")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
