import uuid

import django.core.validators
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Company",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("name", models.CharField(blank=True, max_length=200)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                (
                    "closed_at",
                    models.DateTimeField(blank=True, help_text="Set when closed: admits nothing new.", null=True),
                ),
            ],
            options={
                "verbose_name_plural": "companies",
            },
        ),
        migrations.CreateModel(
            name="Credential",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200)),
                (
                    "reference",
                    models.CharField(
                        help_text="env:NAME or file:/absolute/path; never the secret itself.", max_length=500
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[("active", "Active"), ("disabled", "Disabled"), ("archived", "Archived")],
                        default="active",
                        max_length=10,
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
            ],
        ),
        migrations.CreateModel(
            name="Environment",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200)),
                (
                    "config",
                    models.JSONField(
                        blank=True, default=dict, help_text="What kind of sandbox; the provider's own schema."
                    ),
                ),
                (
                    "policy",
                    models.CharField(
                        choices=[
                            ("ephemeral", "destroy it"),
                            ("reuse_by_environment", "stop it and keep it for the environment's next run"),
                            ("reuse_by_execution_workspace", "stop it and keep it for its workspace's next run"),
                            ("retain_on_failure", "stop and keep it when the run failed, else destroy it"),
                        ],
                        default="ephemeral",
                        max_length=40,
                    ),
                ),
                (
                    "drain_seconds",
                    models.PositiveIntegerField(
                        default=30,
                        help_text="Seconds: how long a released lease waits for work in flight before its sandbox is stopped.",
                        validators=[django.core.validators.MaxValueValidator(3600)],
                    ),
                ),
                ("hourly_price", models.DecimalField(blank=True, decimal_places=4, max_digits=10, null=True)),
                (
                    "status",
                    models.CharField(
                        choices=[("active", "Active"), ("archived", "Archived")], default="active", max_length=10
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
            ],
        ),
        migrations.CreateModel(
            name="Installation",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("only", models.BooleanField(default=True, editable=False, unique=True)),
            ],
            options={
                "constraints": [
                    models.CheckConstraint(condition=models.Q(("only", True)), name="installation_is_one_row")
                ],
            },
        ),
        migrations.CreateModel(
            name="Issue",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("title", models.CharField(max_length=300)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
            ],
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("active", "Active"),
                            ("released", "Released"),
                            ("retained", "Retained"),
                            ("pending_cleanup", "pending cleanup"),
                            ("expired", "Expired"),
                            ("failed", "Failed"),
                        ],
                        max_length=20,
                    ),
                ),
                (
                    "policy",
                    models.CharField(
                        choices=[
                            ("ephemeral", "destroy it"),
                            ("reuse_by_environment", "stop it and keep it for the environment's next run"),
                            ("reuse_by_execution_workspace", "stop it and keep it for its workspace's next run"),
                            ("retain_on_failure", "stop and keep it when the run failed, else destroy it"),
                        ],
                        max_length=40,
                    ),
                ),
                (
                    "outcome",
                    models.CharField(
                        blank=True, choices=[("succeeded", "Succeeded"), ("failed", "Failed")], max_length=10
                    ),
                ),
                (
                    "reason",
                    models.CharField(blank=True, help_text="Short code: why it left the active state.", max_length=60),
                ),
                ("provider", models.CharField(max_length=50)),
                ("endpoint", models.JSONField(default=dict)),
                ("credential_reference", models.CharField(blank=True, max_length=500)),
                ("account_identity", models.CharField(max_length=500)),
                ("config", models.JSONField(default=dict)),
                ("drain_seconds", models.PositiveIntegerField(default=30)),
                ("hourly_price", models.DecimalField(blank=True, decimal_places=4, max_digits=10, null=True)),
                ("resource_id", models.CharField(max_length=200)),
                ("resource_name", models.CharField(max_length=63)),
                ("epoch", models.PositiveIntegerField(default=1)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                (
                    "files_lost",
                    models.BooleanField(default=False, help_text="Destroyed although its files were to be kept."),
                ),
                ("acquired_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("released_at", models.DateTimeField(blank=True, null=True)),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
                (
                    "environment",
                    models.ForeignKey(
                        blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, to="leases.environment"
                    ),
                ),
                (
                    "issue",
                    models.ForeignKey(
                        blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.issue"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="BridgeActivity",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                (
                    "kind",
                    models.CharField(
                        choices=[("execute", "Execute"), ("sync", "Sync")], default="execute", max_length=10
                    ),
                ),
                ("started_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("deadline", models.DateTimeField()),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "outcome",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("completed", "Completed"),
                            ("failed", "Failed"),
                            ("backed_out", "backed out: the lease was released before it began"),
                        ],
                        max_length=12,
                    ),
                ),
                ("exit_code", models.IntegerField(blank=True, null=True)),
                ("error_kind", models.CharField(blank=True, max_length=20)),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
                (
                    "lease",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="activities", to="leases.lease"
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "bridge activities",
            },
        ),
        migrations.CreateModel(
            name="Obligation",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("teardown", "stop or destroy a lease's sandbox, proven"),
                            ("recover_creation", "find out what became of a creation"),
                            ("probe_account", "ask a blocked account whether it works again"),
                        ],
                        max_length=20,
                    ),
                ),
                (
                    "verb",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("stop_only", "stop, never delete"),
                            ("stop_or_delete", "stop, delete if that fails"),
                            ("delete", "Delete"),
                        ],
                        max_length=20,
                    ),
                ),
                ("drain_until", models.DateTimeField(blank=True, null=True)),
                (
                    "delete_announced_at",
                    models.DateTimeField(
                        blank=True, help_text="When a destroying call was first announced.", null=True
                    ),
                ),
                ("due_at", models.DateTimeField(blank=True, null=True)),
                (
                    "owed_since",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("attempt_id", models.UUIDField(blank=True, null=True)),
                ("worker", models.CharField(blank=True, max_length=200, null=True)),
                ("claimed_at", models.DateTimeField(blank=True, null=True)),
                ("wakes", models.PositiveBigIntegerField(default=0)),
                (
                    "requests",
                    models.PositiveIntegerField(default=0, help_text="Attempts that a person asked for (Stop, Retry)."),
                ),
                ("requests_served", models.PositiveIntegerField(default=0)),
                ("failures", models.PositiveIntegerField(default=0)),
                ("busy_count", models.PositiveIntegerField(default=0)),
                ("last_error_kind", models.CharField(blank=True, max_length=20)),
                ("escalated_at", models.DateTimeField(blank=True, null=True)),
                (
                    "quiet",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("creation_not_found", "look for it at the provider: its creation window passed unseen"),
                            ("no_lookup", "find the sandbox by hand: this provider cannot look a creation up by name"),
                            ("foreign_marks", "the sandbox carries another installation's marks; decide whose it is"),
                            (
                                "identity_conflict",
                                "a live lease already owns the sandbox that answered; decide whose it is",
                            ),
                            ("invalid_snapshot", "the recorded configuration no longer fits the provider's schema"),
                        ],
                        max_length=20,
                    ),
                ),
                ("closed_at", models.DateTimeField(blank=True, null=True)),
                (
                    "closed_as",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("proven", "a receipt proves it"),
                            ("unverified", "an operator ended the retries; the debt stays visible"),
                            ("handed_over", "another obligation took it over"),
                            ("nothing_owed", "nothing was owed any more"),
                        ],
                        max_length=20,
                    ),
                ),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
                (
                    "lease",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="obligations",
                        to="leases.lease",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Attempt",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("worker", models.CharField(max_length=200)),
                (
                    "claimed_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("announced_call", models.CharField(blank=True, max_length=20)),
                ("announced_at", models.DateTimeField(blank=True, null=True)),
                ("announced_epoch", models.PositiveIntegerField(blank=True, null=True)),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
                (
                    "outcome",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("proven", "Proven"),
                            ("failed", "Failed"),
                            ("busy", "Busy"),
                            ("draining", "Draining"),
                            ("not_seen", "not seen yet"),
                            ("nothing_owed", "nothing owed any more"),
                            ("handed_over", "handed over"),
                            ("handed_back", "handed back unworked"),
                            ("quieted", "a person is needed"),
                            ("superseded", "its protection ended and another attempt took over"),
                        ],
                        max_length=12,
                    ),
                ),
                ("error_kind", models.CharField(blank=True, max_length=20)),
                ("error_excerpt", models.CharField(blank=True, max_length=300)),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
                (
                    "obligation",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="attempts", to="leases.obligation"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Operation",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("environment_uuid", models.UUIDField()),
                ("run_uuid", models.UUIDField(blank=True, null=True)),
                ("issue_uuid", models.UUIDField(blank=True, null=True)),
                ("lease_uuid", models.UUIDField(unique=True)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("pending", "the provider may have allocated a sandbox that no lease owns"),
                            ("attached", "a lease owns the sandbox"),
                            ("resolved", "nothing is owned any more, or nothing was ever allocated"),
                        ],
                        default="pending",
                        max_length=10,
                    ),
                ),
                ("name", models.CharField(max_length=63)),
                ("marks", models.JSONField(default=dict)),
                ("provider", models.CharField(max_length=50)),
                ("endpoint", models.JSONField(default=dict)),
                ("credential_reference", models.CharField(blank=True, max_length=500)),
                ("account_identity", models.CharField(max_length=500)),
                ("config", models.JSONField(default=dict)),
                ("policy", models.CharField(max_length=40)),
                ("drain_seconds", models.PositiveIntegerField(default=30)),
                ("hourly_price", models.DecimalField(blank=True, decimal_places=4, max_digits=10, null=True)),
                ("finds_by_name", models.BooleanField()),
                (
                    "creation_window",
                    models.FloatField(help_text="Seconds during which a lost creation may still appear."),
                ),
                ("resource_id", models.CharField(blank=True, max_length=200)),
                ("looks", models.PositiveIntegerField(default=0, help_text="Look-ups so far that did not find it.")),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("cancelled_at", models.DateTimeField(blank=True, null=True)),
                ("resolved_at", models.DateTimeField(blank=True, null=True)),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
                (
                    "lease",
                    models.OneToOneField(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="operation",
                        to="leases.lease",
                    ),
                ),
            ],
        ),
        migrations.AddField(
            model_name="obligation",
            name="operation",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="obligations",
                to="leases.operation",
            ),
        ),
        migrations.CreateModel(
            name="ProviderAccount",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200)),
                ("provider", models.CharField(max_length=50)),
                (
                    "endpoint",
                    models.JSONField(
                        blank=True, default=dict, help_text="Where the provider is reached; its own schema."
                    ),
                ),
                ("attested_identity", models.CharField(blank=True, editable=False, max_length=500)),
                (
                    "concurrency_limit",
                    models.PositiveIntegerField(
                        default=50,
                        help_text="Obligations worked on at the same time.",
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                (
                    "blocked_until",
                    models.DateTimeField(
                        blank=True, help_text="No claim before this time (the provider's Retry-After).", null=True
                    ),
                ),
                (
                    "circuit",
                    models.CharField(
                        choices=[("closed", "Closed"), ("open", "Open")],
                        default="closed",
                        editable=False,
                        max_length=10,
                    ),
                ),
                ("circuit_failures", models.PositiveIntegerField(default=0, editable=False)),
                ("hinted_until", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
                (
                    "credential",
                    models.ForeignKey(
                        blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.credential"
                    ),
                ),
            ],
        ),
        migrations.AddField(
            model_name="operation",
            name="account",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.provideraccount"),
        ),
        migrations.AddField(
            model_name="obligation",
            name="account",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="obligations", to="leases.provideraccount"
            ),
        ),
        migrations.AddField(
            model_name="obligation",
            name="probed_account",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="probes",
                to="leases.provideraccount",
            ),
        ),
        migrations.AddField(
            model_name="lease",
            name="account",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.provideraccount"),
        ),
        migrations.AddField(
            model_name="environment",
            name="account",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.provideraccount"),
        ),
        migrations.CreateModel(
            name="Receipt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("company_uuid", models.UUIDField()),
                ("run_uuid", models.UUIDField(blank=True, null=True)),
                ("resource_id", models.CharField(max_length=200)),
                ("account_identity", models.CharField(max_length=500)),
                ("epoch", models.PositiveIntegerField()),
                (
                    "evidence",
                    models.CharField(
                        choices=[
                            ("stopped", "Stopped"),
                            ("destroyed", "Destroyed"),
                            ("absent", "absent: gone, and the provider's second source agrees"),
                        ],
                        max_length=10,
                    ),
                ),
                (
                    "ended",
                    models.CharField(
                        choices=[("killed", "Killed"), ("suspended", "Suspended")], default="killed", max_length=10
                    ),
                ),
                ("attempt_id", models.UUIDField()),
                (
                    "confirmed_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                (
                    "account",
                    models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.provideraccount"),
                ),
                (
                    "lease",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="receipts", to="leases.lease"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Run",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("queued", "Queued"),
                            ("scheduled_retry", "Scheduled Retry"),
                            ("running", "Running"),
                            ("succeeded", "Succeeded"),
                            ("interrupted", "Interrupted"),
                            ("failed", "Failed"),
                            ("cancelled", "Cancelled"),
                            ("timed_out", "Timed Out"),
                        ],
                        default="queued",
                        max_length=20,
                    ),
                ),
                ("controller_id", models.CharField(blank=True, max_length=200)),
                ("controller_generation", models.PositiveIntegerField(default=0)),
                ("controller_expires_at", models.DateTimeField(blank=True, null=True)),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
                (
                    "issue",
                    models.ForeignKey(
                        blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.issue"
                    ),
                ),
            ],
        ),
        migrations.AddField(
            model_name="lease",
            name="run",
            field=models.ForeignKey(
                blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.run"
            ),
        ),
        migrations.CreateModel(
            name="ActivityEntry",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False)),
                ("actor", models.CharField(max_length=200)),
                ("action", models.CharField(help_text="Dotted name, such as lease.released.", max_length=100)),
                ("subject_type", models.CharField(max_length=40)),
                ("subject_id", models.CharField(max_length=40)),
                ("reason", models.CharField(blank=True, max_length=500)),
                ("details", models.JSONField(blank=True, default=dict)),
                ("company", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company")),
            ],
            options={
                "verbose_name_plural": "activity entries",
                "indexes": [
                    models.Index(fields=["subject_type", "subject_id", "at"], name="entry_of_subject"),
                    models.Index(fields=["-at"], name="entry_newest_first"),
                ],
            },
        ),
        migrations.AddConstraint(
            model_name="credential",
            constraint=models.UniqueConstraint(fields=("company", "name"), name="credential_name_is_unique"),
        ),
        migrations.AddConstraint(
            model_name="credential",
            constraint=models.CheckConstraint(
                condition=models.Q(("reference__regex", "^(env|file):.+$")), name="credential_is_a_reference"
            ),
        ),
        migrations.AddConstraint(
            model_name="credential",
            constraint=models.CheckConstraint(
                condition=models.Q(("status__in", ["active", "disabled", "archived"])),
                name="credential_status_is_known",
            ),
        ),
        migrations.AddIndex(
            model_name="bridgeactivity",
            index=models.Index(condition=models.Q(("ended_at__isnull", True)), fields=["lease"], name="activity_open"),
        ),
        migrations.AddConstraint(
            model_name="bridgeactivity",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("ended_at__isnull", True), ("outcome", "")),
                    models.Q(("ended_at__isnull", False), ("outcome__in", ["completed", "failed", "backed_out"])),
                    _connector="OR",
                ),
                name="activity_ends_with_an_outcome",
            ),
        ),
        migrations.AddIndex(
            model_name="attempt",
            index=models.Index(fields=["obligation", "claimed_at"], name="attempt_history"),
        ),
        migrations.AddIndex(
            model_name="attempt",
            index=models.Index(fields=["-claimed_at"], name="attempt_newest_first"),
        ),
        migrations.AddConstraint(
            model_name="attempt",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("finished_at__isnull", True), ("outcome", "")),
                    models.Q(("finished_at__isnull", False), models.Q(("outcome", ""), _negated=True)),
                    _connector="OR",
                ),
                name="attempt_finishes_with_an_outcome",
            ),
        ),
        migrations.AddConstraint(
            model_name="provideraccount",
            constraint=models.UniqueConstraint(fields=("company", "name"), name="account_name_is_unique"),
        ),
        migrations.AddConstraint(
            model_name="provideraccount",
            constraint=models.CheckConstraint(
                condition=models.Q(("concurrency_limit__gte", 1)), name="account_limit_is_positive"
            ),
        ),
        migrations.AddConstraint(
            model_name="provideraccount",
            constraint=models.CheckConstraint(
                condition=models.Q(("circuit__in", ["closed", "open"])), name="account_circuit_is_known"
            ),
        ),
        migrations.AddIndex(
            model_name="operation",
            index=models.Index(
                condition=models.Q(("state", "pending")), fields=["run_uuid"], name="operation_pending_of_run"
            ),
        ),
        migrations.AddIndex(
            model_name="operation",
            index=models.Index(fields=["-created_at"], name="operation_newest_first"),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(fields=("account", "name"), name="operation_name_is_unique"),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(("account_identity", ""), _negated=True), name="operation_names_its_account"
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["pending", "attached", "resolved"])), name="operation_state_is_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("state", "attached"), _negated=True), ("lease__isnull", False), _connector="OR"
                ),
                name="operation_attached_has_a_lease",
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("resolved_at__isnull", False), ("state", "resolved")),
                    models.Q(models.Q(("state", "resolved"), _negated=True), ("resolved_at__isnull", True)),
                    _connector="OR",
                ),
                name="operation_resolved_says_when",
            ),
        ),
        migrations.AddIndex(
            model_name="obligation",
            index=models.Index(
                condition=models.Q(("due_at__isnull", False)), fields=["account", "due_at"], name="obligation_due"
            ),
        ),
        migrations.AddIndex(
            model_name="obligation",
            index=models.Index(
                condition=models.Q(("requests__gt", models.F("requests_served"))),
                fields=["account"],
                name="obligation_urgent",
            ),
        ),
        migrations.AddIndex(
            model_name="obligation",
            index=models.Index(
                condition=models.Q(("attempt_id__isnull", False)),
                fields=["account", "due_at"],
                name="obligation_claimed",
            ),
        ),
        migrations.AddIndex(
            model_name="obligation",
            index=models.Index(
                condition=models.Q(("closed_at__isnull", True)), fields=["kind"], name="obligation_open"
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("kind", "teardown"),
                        ("lease__isnull", False),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                    ),
                    models.Q(
                        ("kind", "recover_creation"),
                        ("lease__isnull", True),
                        ("operation__isnull", False),
                        ("probed_account__isnull", True),
                    ),
                    models.Q(
                        ("kind", "probe_account"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account", models.F("account")),
                    ),
                    _connector="OR",
                ),
                name="obligation_has_the_subject_of_its_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("attempt_id__isnull", True), ("claimed_at__isnull", True), ("worker__isnull", True)),
                    models.Q(("attempt_id__isnull", False), ("claimed_at__isnull", False), ("worker__isnull", False)),
                    _connector="OR",
                ),
                name="obligation_claim_is_whole",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("due_at__isnull", True),
                        models.Q(models.Q(("quiet", ""), _negated=True), ("closed_at__isnull", False), _connector="OR"),
                    ),
                    models.Q(("due_at__isnull", False), ("quiet", ""), ("closed_at__isnull", True)),
                    _connector="OR",
                ),
                name="obligation_is_due_unless_quiet_or_closed",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(("due_at__isnull", False), ("attempt_id__isnull", True), _connector="OR"),
                name="obligation_claimed_only_while_due",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("closed_as", ""), ("closed_at__isnull", True)),
                    models.Q(("closed_at__isnull", False), models.Q(("closed_as", ""), _negated=True)),
                    _connector="OR",
                ),
                name="obligation_closes_as_something",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind", "teardown"), ("verb__in", ["stop_only", "stop_or_delete", "delete"])),
                    models.Q(
                        models.Q(("kind", "teardown"), _negated=True), ("drain_until__isnull", True), ("verb", "")
                    ),
                    _connector="OR",
                ),
                name="obligation_verb_is_a_teardowns",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(("requests_served__lte", models.F("requests"))),
                name="obligation_serves_what_was_requested",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("closed_at__isnull", True), ("lease__isnull", False)),
                fields=("lease", "kind"),
                name="obligation_is_one_per_lease_and_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("closed_at__isnull", True), ("operation__isnull", False)),
                fields=("operation", "kind"),
                name="obligation_is_one_per_operation_and_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("closed_at__isnull", True), ("probed_account__isnull", False)),
                fields=("probed_account", "kind"),
                name="obligation_is_one_per_account_and_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("attempt_id__isnull", False)),
                fields=("attempt_id",),
                name="obligation_attempt_is_its_own",
            ),
        ),
        migrations.AddConstraint(
            model_name="environment",
            constraint=models.UniqueConstraint(fields=("company", "name"), name="environment_name_is_unique"),
        ),
        migrations.AddConstraint(
            model_name="environment",
            constraint=models.CheckConstraint(
                condition=models.Q(("status__in", ["active", "archived"])), name="environment_status_is_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="environment",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "policy__in",
                        ["ephemeral", "reuse_by_environment", "reuse_by_execution_workspace", "retain_on_failure"],
                    )
                ),
                name="environment_policy_is_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="environment",
            constraint=models.CheckConstraint(
                condition=models.Q(("drain_seconds__lte", 3600)), name="environment_drain_is_bounded"
            ),
        ),
        migrations.AddIndex(
            model_name="receipt",
            index=models.Index(fields=["lease", "epoch"], name="receipt_of_epoch"),
        ),
        migrations.AddIndex(
            model_name="receipt",
            index=models.Index(fields=["-confirmed_at"], name="receipt_newest_first"),
        ),
        migrations.AddConstraint(
            model_name="receipt",
            constraint=models.CheckConstraint(
                condition=models.Q(("evidence__in", ["stopped", "destroyed", "absent"])),
                name="receipt_evidence_is_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="receipt",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("ended", "killed"), models.Q(("ended", "suspended"), ("evidence", "stopped")), _connector="OR"
                ),
                name="receipt_only_a_stopped_sandbox_is_suspended",
            ),
        ),
        migrations.AddConstraint(
            model_name="receipt",
            constraint=models.UniqueConstraint(
                fields=("attempt_id", "epoch", "evidence"), name="receipt_is_one_per_finding"
            ),
        ),
        migrations.AddConstraint(
            model_name="run",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "status__in",
                        [
                            "queued",
                            "scheduled_retry",
                            "running",
                            "succeeded",
                            "interrupted",
                            "failed",
                            "cancelled",
                            "timed_out",
                        ],
                    )
                ),
                name="run_status_is_known",
            ),
        ),
        migrations.AddIndex(
            model_name="lease",
            index=models.Index(fields=["company", "state"], name="lease_company_state"),
        ),
        migrations.AddIndex(
            model_name="lease",
            index=models.Index(fields=["resource_id"], name="lease_resource"),
        ),
        migrations.AddIndex(
            model_name="lease",
            index=models.Index(fields=["-acquired_at"], name="lease_newest_first"),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("state__in", ["active", "released", "retained", "pending_cleanup", "expired", "failed"])
                ),
                name="lease_state_is_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "policy__in",
                        ["ephemeral", "reuse_by_environment", "reuse_by_execution_workspace", "retain_on_failure"],
                    )
                ),
                name="lease_policy_is_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("outcome__in", ["", "succeeded", "failed"])), name="lease_outcome_is_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("released_at__isnull", True), ("state", "active")),
                    models.Q(models.Q(("state", "active"), _negated=True), ("released_at__isnull", False)),
                    _connector="OR",
                ),
                name="lease_is_active_until_released",
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("resource_id", ""), _negated=True), name="lease_names_its_sandbox"
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("account_identity", ""), _negated=True), name="lease_names_its_account"
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(condition=models.Q(("epoch__gte", 1)), name="lease_epoch_is_positive"),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.UniqueConstraint(
                condition=models.Q(("state__in", ["active", "pending_cleanup", "retained"])),
                fields=("account", "resource_id"),
                name="lease_is_the_only_live_one_of_its_sandbox",
            ),
        ),
    ]
