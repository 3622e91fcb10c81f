from pathlib import Path

from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0016_history.sql").read_text(encoding="utf-8")
VERBS = ["stop_only", "stop_or_delete", "delete"]


class Migration(migrations.Migration):
    dependencies = [("leases", "0015_fence")]

    operations = [
        migrations.RemoveConstraint(model_name="obligation", name="obligation_absence_is_a_teardowns"),
        migrations.RemoveConstraint(model_name="obligation", name="obligation_verb_is_a_teardowns"),
        migrations.AlterField(
            model_name="obligation",
            name="verb",
            field=models.CharField(
                blank=True,
                choices=[
                    ("stop_only", "stop, never delete"),
                    ("stop_or_delete", "stop, delete if that fails"),
                    ("delete", "Delete"),
                ],
                help_text="What is demanded, or was when it ended unproven.",
                max_length=20,
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind", "teardown"), ("verb__in", VERBS)),
                    models.Q(
                        ("drain_until__isnull", True), ("held_verb", ""), ("kind", "verify_end"), ("verb__in", VERBS)
                    ),
                    models.Q(
                        models.Q(("kind__in", ["teardown", "verify_end"]), _negated=True),
                        ("drain_until__isnull", True),
                        ("held_verb", ""),
                        ("verb", ""),
                    ),
                    _connector="OR",
                ),
                name="obligation_verb_is_a_teardowns",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("kind__in", ["teardown", "verify_end"]), ("absent_since__isnull", True), _connector="OR"
                ),
                name="obligation_absence_is_a_teardowns",
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
