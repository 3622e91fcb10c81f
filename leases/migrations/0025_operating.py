from pathlib import Path

from django.db import migrations

SQL = (Path(__file__).parent / "sql" / "0025_operating.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0024_cancelling"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="recovery",
            options={
                "permissions": [("recover_files", "Can recover the files of a sandbox again")],
                "verbose_name_plural": "recoveries",
            },
        ),
        migrations.AlterModelOptions(
            name="continuation",
            options={"permissions": [("withdraw_continuation", "Can withdraw a continuation")]},
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
