from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0024_cancelling.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0023_download_archive")]

    operations = [migrations.RunSQL(SQL, migrations.RunSQL.noop)]
