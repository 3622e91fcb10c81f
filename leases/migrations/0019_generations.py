from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0019_generations.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0018_wake")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
