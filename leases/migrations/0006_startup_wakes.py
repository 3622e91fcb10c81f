from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0006_startup_wakes.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0005_credential_rules")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
