import datetime as dt
from pathlib import Path

import django.db.models.deletion
import django.db.models.expressions
import django.db.models.functions.datetime
from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0010_inventory.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0009_lane"),
    ]

    operations = [
        migrations.CreateModel(
            name="InventoryFinding",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("provider", models.CharField(max_length=50)),
                ("account_identity", models.CharField(max_length=500)),
                ("resource_id", models.CharField(max_length=200)),
                ("resource_name", models.CharField(blank=True, max_length=200)),
                ("marks", models.JSONField(blank=True, default=dict, help_text="Ours alone.")),
                (
                    "verdict",
                    models.CharField(
                        choices=[
                            ("settled", "settled: the lease is over, and the sandbox is there (a leak)"),
                            ("unknown", "unknown: it carries our marks, and no lease or creation owns it (a leak)"),
                            (
                                "ambiguous",
                                "ambiguous: its marks are those of a creation whose sandbox is another one; you decide",
                            ),
                            ("missing", "missing: the lease should have a sandbox, and the listing does not hold it"),
                        ],
                        max_length=10,
                    ),
                ),
                ("hourly_price", models.DecimalField(blank=True, decimal_places=4, max_digits=10, null=True)),
                (
                    "first_seen_at",
                    models.DateTimeField(help_text="When the first complete listing began that saw it so."),
                ),
                ("last_seen_at", models.DateTimeField()),
                (
                    "sightings",
                    models.PositiveIntegerField(default=1, help_text="Complete listings in a row that saw it so."),
                ),
                ("confirmed_at", models.DateTimeField(blank=True, null=True)),
                ("resolved_at", models.DateTimeField(blank=True, null=True)),
                (
                    "resolution",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("known", "a lease or a creation of ours knows it"),
                            ("not_listed", "not listed any more"),
                            ("changed", "it looks otherwise now"),
                            ("over", "listed again, or its lease needs no sandbox any more"),
                        ],
                        max_length=10,
                    ),
                ),
                (
                    "account",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="findings",
                        to="leases.provideraccount",
                    ),
                ),
                (
                    "company",
                    models.ForeignKey(
                        blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.company"
                    ),
                ),
                (
                    "lease",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="findings",
                        to="leases.lease",
                    ),
                ),
                (
                    "obligation",
                    models.ForeignKey(
                        blank=True,
                        help_text="Its teardown.",
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="findings",
                        to="leases.obligation",
                    ),
                ),
            ],
            options={
                "permissions": [("destroy_leak", "Can adopt and destroy what an inventory found")],
                "indexes": [models.Index(fields=["-first_seen_at"], name="finding_newest_first")],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("verdict__in", ["settled", "unknown", "ambiguous", "missing"])),
                        name="finding_verdict_is_known",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("verdict__in", ["settled", "missing"]), _negated=True),
                            ("lease__isnull", False),
                            _connector="OR",
                        ),
                        name="finding_names_the_lease_it_is_about",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("confirmed_at__isnull", True),
                            models.Q(
                                (
                                    "confirmed_at__gte",
                                    django.db.models.expressions.CombinedExpression(
                                        models.F("first_seen_at"), "+", models.Value(dt.timedelta(seconds=900))
                                    ),
                                ),
                                ("sightings__gte", 2),
                            ),
                            _connector="OR",
                        ),
                        name="finding_is_confirmed_after_its_grace",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("obligation__isnull", True),
                            models.Q(
                                ("confirmed_at__isnull", False),
                                ("lease__isnull", False),
                                ("verdict__in", ["settled", "unknown", "ambiguous"]),
                            ),
                            _connector="OR",
                        ),
                        name="finding_is_owned_once_confirmed",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("lease__isnull", True), ("company__isnull", False), _connector="OR"),
                        name="finding_of_a_lease_names_its_company",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("resolution", ""), ("resolved_at__isnull", True)),
                            models.Q(("resolved_at__isnull", False), models.Q(("resolution", ""), _negated=True)),
                            _connector="OR",
                        ),
                        name="finding_resolves_as_something",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("resolved_at__isnull", True)),
                        fields=("provider", "account_identity", "resource_id"),
                        name="finding_is_the_only_open_one_of_its_sandbox",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="InventoryListing",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("provider", models.CharField(max_length=50)),
                ("account_identity", models.CharField(max_length=500)),
                (
                    "outcome",
                    models.CharField(
                        choices=[
                            ("complete", "Complete"),
                            ("failed", "failed: it changed nothing"),
                            ("overtaken", "overtaken: one that began later was complete first"),
                        ],
                        max_length=10,
                    ),
                ),
                ("problem", models.CharField(blank=True, help_text="Why it failed.", max_length=300)),
                ("began_at", models.DateTimeField()),
                (
                    "ended_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("alive", models.PositiveIntegerField(default=0)),
                ("settled", models.PositiveIntegerField(default=0)),
                ("unknown", models.PositiveIntegerField(default=0)),
                ("ambiguous", models.PositiveIntegerField(default=0)),
                ("missing", models.PositiveIntegerField(default=0)),
                ("foreign", models.PositiveIntegerField(default=0)),
                ("unmarked", models.PositiveIntegerField(default=0)),
                (
                    "account",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="listings",
                        to="leases.provideraccount",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["provider", "account_identity", "-began_at"], name="listing_newest_of_identity"
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("outcome", "complete"), ("problem", "")),
                            models.Q(("outcome", "overtaken"), ("problem", "")),
                            models.Q(("outcome", "failed"), models.Q(("problem", ""), _negated=True)),
                            _connector="OR",
                        ),
                        name="listing_failed_says_why",
                    )
                ],
            },
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
