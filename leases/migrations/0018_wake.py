from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0018_wake.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0017_put_off")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
