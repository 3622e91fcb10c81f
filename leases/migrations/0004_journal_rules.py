from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0004_journal_rules.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0003_journal")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
