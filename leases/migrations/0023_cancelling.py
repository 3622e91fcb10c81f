from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0023_cancelling.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0022_continuing")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
