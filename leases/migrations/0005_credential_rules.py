from pathlib import Path

from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0005_credential_rules.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [("leases", "0004_journal_rules")]

    operations = [
        migrations.AddIndex(
            model_name="obligation",
            index=models.Index(
                condition=models.Q(("quiet", ""), _negated=True), fields=["company"], name="obligation_quiet"
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
