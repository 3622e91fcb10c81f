import uuid
from pathlib import Path

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0020_recovery.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0019_generations"),
    ]

    operations = [
        migrations.CreateModel(
            name="Archive",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("attempt_id", models.UUIDField(unique=True)),
                ("epoch", models.PositiveIntegerField()),
                ("path", models.CharField(help_text="The directory in the sandbox.", max_length=1000)),
                ("name", models.CharField(max_length=300, unique=True)),
                (
                    "begun_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("size", models.PositiveBigIntegerField(blank=True, help_text="Bytes.", null=True)),
                ("sha256", models.CharField(blank=True, max_length=64)),
                (
                    "saved_at",
                    models.DateTimeField(blank=True, help_text="When it was whole in the storage.", null=True),
                ),
                (
                    "removed_at",
                    models.DateTimeField(
                        blank=True, help_text="When the file was removed from the storage.", null=True
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Continuation",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("retry", "retry of a named failed run"),
                            ("comment", "a new comment of a user"),
                            ("queued_message", "a message that the server recorded as queued"),
                        ],
                        max_length=20,
                    ),
                ),
                ("requested_by", models.CharField(help_text="The user.", max_length=200)),
                (
                    "message_id",
                    models.CharField(
                        blank=True, help_text="The control plane's own name of the message.", max_length=200
                    ),
                ),
                ("authored_at", models.DateTimeField(blank=True, help_text="When the message was written.", null=True)),
                ("recovers_files", models.BooleanField(default=True, help_text="Whether the files are saved first.")),
                (
                    "state",
                    models.CharField(
                        choices=[("waiting", "Waiting"), ("started", "Started"), ("withdrawn", "Withdrawn")],
                        default="waiting",
                        max_length=10,
                    ),
                ),
                (
                    "hold",
                    models.CharField(blank=True, help_text="The code of the gate that was closed.", max_length=40),
                ),
                ("hold_sentence", models.CharField(blank=True, max_length=500)),
                (
                    "readiness",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("same_workspace", "as the environment reuses sandboxes"),
                            ("files_recovered", "the files of the failed run were saved"),
                            ("fresh_isolated_workspace", "a fresh isolated workspace"),
                        ],
                        max_length=30,
                    ),
                ),
                (
                    "requested_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("evaluated_at", models.DateTimeField(blank=True, null=True)),
                (
                    "ended_at",
                    models.DateTimeField(blank=True, help_text="When it started a run, or was withdrawn.", null=True),
                ),
                ("withdrawn_by", models.CharField(blank=True, max_length=200)),
            ],
        ),
        migrations.CreateModel(
            name="IssueFacts",
            fields=[
                (
                    "issue",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="facts",
                        serialize=False,
                        to="leases.issue",
                    ),
                ),
                ("is_open", models.BooleanField(blank=True, null=True)),
                (
                    "assignee",
                    models.CharField(
                        blank=True, help_text="The agent that the task is assigned to.", max_length=200, null=True
                    ),
                ),
                (
                    "decisions_pending",
                    models.PositiveIntegerField(
                        blank=True, help_text="How many approvals and questions wait for an answer.", null=True
                    ),
                ),
                ("told_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False)),
            ],
            options={
                "verbose_name_plural": "issue facts",
            },
        ),
        migrations.CreateModel(
            name="Recovery",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("generation", models.PositiveIntegerField()),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "Running"),
                            ("complete", "complete: the files are saved"),
                            ("exhausted", "exhausted: the work goes on without the files"),
                        ],
                        default="running",
                        max_length=10,
                    ),
                ),
                ("requested_by", models.CharField(max_length=200)),
                ("reason", models.CharField(blank=True, help_text="Why a person asked for it.", max_length=500)),
                (
                    "attempts",
                    models.PositiveSmallIntegerField(default=0, help_text="How often the sandbox was asked to start."),
                ),
                (
                    "started_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("ends_at", models.DateTimeField(help_text="No attempt begins after that.")),
                ("next_attempt_at", models.DateTimeField(blank=True, null=True)),
                (
                    "restarted_epoch",
                    models.PositiveIntegerField(
                        blank=True, help_text="The epoch that its last confirmed restart began.", null=True
                    ),
                ),
                (
                    "failure",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("source_unavailable", "the sandbox cannot run any more, or is gone"),
                            ("workspace_missing", "the workspace is not in the sandbox"),
                            ("archive_too_large", "the workspace is larger than an archive may be"),
                            ("provider_unavailable", "the provider could not do it"),
                            ("storage_unavailable", "the archive could not be written"),
                            ("stopped", "somebody stopped it"),
                        ],
                        max_length=20,
                    ),
                ),
                (
                    "disposition",
                    models.CharField(
                        blank=True,
                        choices=[("retry", "try again"), ("use_alternative_strategy", "go on without the files")],
                        max_length=30,
                    ),
                ),
                ("error_kind", models.CharField(blank=True, max_length=20)),
                ("error_excerpt", models.CharField(blank=True, max_length=300)),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "verbose_name_plural": "recoveries",
            },
        ),
        migrations.CreateModel(
            name="RecoveryAction",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("cause", models.CharField(max_length=200)),
                (
                    "opened_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("closed_at", models.DateTimeField(blank=True, null=True)),
                ("closed_by", models.CharField(blank=True, max_length=200)),
            ],
        ),
        migrations.CreateModel(
            name="RunFacts",
            fields=[
                (
                    "run",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="facts",
                        serialize=False,
                        to="leases.run",
                    ),
                ),
                (
                    "adapter_attached",
                    models.BooleanField(
                        blank=True, help_text="Whether the agent's adapter still controls the execution.", null=True
                    ),
                ),
                (
                    "coordinator",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("settling", "Settling"),
                            ("retryable_failure", "Retryable Failure"),
                            ("terminal_failure", "Terminal Failure"),
                            ("committed", "Committed"),
                        ],
                        max_length=20,
                    ),
                ),
                (
                    "coordinator_owner",
                    models.CharField(blank=True, help_text="Who is at work on the result.", max_length=200, null=True),
                ),
                (
                    "accepted_failed_result",
                    models.BooleanField(
                        blank=True,
                        help_text="Whether a committed result is one that failed, and was accepted as that.",
                        null=True,
                    ),
                ),
                (
                    "history_available",
                    models.BooleanField(
                        blank=True, help_text="Whether the history that a continuation needs can be read.", null=True
                    ),
                ),
                ("process_id", models.PositiveIntegerField(blank=True, help_text="Decides nothing.", null=True)),
                ("told_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False)),
            ],
            options={
                "verbose_name_plural": "run facts",
            },
        ),
        migrations.RemoveConstraint(
            model_name="obligation",
            name="obligation_has_the_subject_of_its_kind",
        ),
        migrations.RemoveConstraint(
            model_name="obligation",
            name="obligation_names_whom_it_calls",
        ),
        migrations.AddField(
            model_name="lease",
            name="may_be_running_since",
            field=models.DateTimeField(
                blank=True,
                help_text="Since when the sandbox of a proven end may run again: a restart of it was never answered.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="adapter",
            field=models.CharField(
                blank=True, help_text="How the agent is run, as the control plane says; final once told.", max_length=50
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="agent",
            field=models.CharField(
                blank=True, help_text="Who works: the control plane's name of the agent.", max_length=200
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="cancel_confirmed_at",
            field=models.DateTimeField(
                blank=True, help_text="When the execution of the cancelled run was proven ended.", null=True
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="cancel_requested_at",
            field=models.DateTimeField(blank=True, help_text="When the run's cancellation was asked for.", null=True),
        ),
        migrations.AddField(
            model_name="run",
            name="continues",
            field=models.ForeignKey(
                blank=True,
                help_text="The failed run that this one goes on from.",
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="continued_by",
                to="leases.run",
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="fresh_workspace",
            field=models.BooleanField(
                default=False, help_text="It begins in a new sandbox, and gets none that another run left."
            ),
        ),
        migrations.AlterField(
            model_name="obligation",
            name="kind",
            field=models.CharField(
                choices=[
                    ("teardown", "stop or destroy a lease's sandbox, proven"),
                    ("recover_creation", "find out what became of a creation"),
                    ("recover_start", "find out what became of a start"),
                    ("startup", "see what a startup of a run left behind to its end"),
                    ("extend", "keep the provider's own deadline ahead"),
                    ("end_lease", "release an ad-hoc lease at its deadline"),
                    ("probe_account", "ask a blocked account whether it works again"),
                    ("settle_orphan", "stop and keep the sandbox of a lease that nobody holds"),
                    ("dispose", "destroy a kept sandbox when nothing needs it any more"),
                    ("end_fence", "keep what a controller fenced when it went down and did not save"),
                    ("verify_end", "find proof of an end that was never proven"),
                    ("watch_controllers", "interrupt the runs whose controllers are gone"),
                    ("recover_workspace", "reopen a stopped sandbox and save its files"),
                    ("end_recovery", "end a recovery of files whose time is over"),
                    ("watch_restart", "see whether a sandbox runs whose restart was never answered"),
                    ("start_continuation", "start the run that continues a failed one"),
                    ("confirm_cancel", "confirm a cancellation when the execution is proven ended"),
                ],
                max_length=20,
            ),
        ),
        migrations.AddConstraint(
            model_name="run",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("cancel_confirmed_at__isnull", True), ("cancel_requested_at__isnull", False), _connector="OR"
                ),
                name="run_cancellation_is_requested_first",
            ),
        ),
        migrations.AddField(
            model_name="archive",
            name="company",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company"),
        ),
        migrations.AddField(
            model_name="archive",
            name="lease",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="archives", to="leases.lease"
            ),
        ),
        migrations.AddField(
            model_name="archive",
            name="receipt",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="archives",
                to="leases.receipt",
            ),
        ),
        migrations.AddField(
            model_name="continuation",
            name="company",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company"),
        ),
        migrations.AddField(
            model_name="continuation",
            name="issue",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="continuations", to="leases.issue"
            ),
        ),
        migrations.AddField(
            model_name="continuation",
            name="run",
            field=models.ForeignKey(
                help_text="The failed run that it continues.",
                on_delete=django.db.models.deletion.PROTECT,
                related_name="continuations",
                to="leases.run",
            ),
        ),
        migrations.AddField(
            model_name="continuation",
            name="started_run",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="started_by_continuations",
                to="leases.run",
            ),
        ),
        migrations.AddField(
            model_name="obligation",
            name="continuation",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="obligations",
                to="leases.continuation",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("continuation__isnull", True),
                        ("installation__isnull", True),
                        (
                            "kind__in",
                            [
                                "teardown",
                                "extend",
                                "end_lease",
                                "settle_orphan",
                                "dispose",
                                "end_fence",
                                "verify_end",
                                "recover_workspace",
                                "end_recovery",
                                "watch_restart",
                            ],
                        ),
                        ("lease__isnull", False),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("continuation__isnull", True),
                        ("installation__isnull", True),
                        ("kind__in", ["recover_creation", "recover_start"]),
                        ("lease__isnull", True),
                        ("operation__isnull", False),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("continuation__isnull", True),
                        ("installation__isnull", True),
                        ("kind__in", ["startup", "confirm_cancel"]),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", False),
                    ),
                    models.Q(
                        ("continuation__isnull", False),
                        ("installation__isnull", True),
                        ("kind", "start_continuation"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("continuation__isnull", True),
                        ("installation__isnull", False),
                        ("kind", "watch_controllers"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("continuation__isnull", True),
                        ("installation__isnull", True),
                        ("kind", "probe_account"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account__isnull", False),
                        ("run__isnull", True),
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
                    ("account__isnull", False),
                    (
                        "kind__in",
                        [
                            "startup",
                            "end_lease",
                            "settle_orphan",
                            "dispose",
                            "end_fence",
                            "watch_controllers",
                            "end_recovery",
                            "start_continuation",
                            "confirm_cancel",
                        ],
                    ),
                    _connector="OR",
                ),
                name="obligation_names_whom_it_calls",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("closed_at__isnull", True), ("continuation__isnull", False)),
                fields=("continuation", "kind"),
                name="obligation_is_one_per_continuation_and_kind",
            ),
        ),
        migrations.AddField(
            model_name="recovery",
            name="activity",
            field=models.ForeignKey(
                blank=True,
                editable=False,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="+",
                to="leases.bridgeactivity",
            ),
        ),
        migrations.AddField(
            model_name="recovery",
            name="company",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company"),
        ),
        migrations.AddField(
            model_name="recovery",
            name="lease",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="recoveries", to="leases.lease"
            ),
        ),
        migrations.AddField(
            model_name="continuation",
            name="recovery",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="continuations",
                to="leases.recovery",
            ),
        ),
        migrations.AddField(
            model_name="archive",
            name="recovery",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="archives", to="leases.recovery"
            ),
        ),
        migrations.AddField(
            model_name="operation",
            name="recovery",
            field=models.ForeignKey(
                blank=True,
                help_text="The generation whose attempt a start is; empty: an acquire's.",
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="operations",
                to="leases.recovery",
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(("recovery__isnull", True), ("kind", "start"), _connector="OR"),
                name="operation_of_a_recovery_is_a_start",
            ),
        ),
        migrations.AddField(
            model_name="recoveryaction",
            name="company",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company"),
        ),
        migrations.AddField(
            model_name="recoveryaction",
            name="issue",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="recovery_actions", to="leases.issue"
            ),
        ),
        migrations.AddField(
            model_name="recoveryaction",
            name="run",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="recovery_actions",
                to="leases.run",
            ),
        ),
        migrations.AddConstraint(
            model_name="runfacts",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("coordinator__in", ["", "settling", "retryable_failure", "terminal_failure", "committed"])
                ),
                name="run_coordinator_is_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="recovery",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("finished_at__isnull", True), ("state", "running")),
                    models.Q(("finished_at__isnull", False), ("state__in", ["complete", "exhausted"])),
                    _connector="OR",
                ),
                name="recovery_ends_in_a_state",
            ),
        ),
        migrations.AddConstraint(
            model_name="recovery",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("disposition", ""), ("failure", "")),
                    models.Q(
                        ("disposition__in", ["retry", "use_alternative_strategy"]),
                        (
                            "failure__in",
                            [
                                "source_unavailable",
                                "workspace_missing",
                                "archive_too_large",
                                "provider_unavailable",
                                "storage_unavailable",
                                "stopped",
                            ],
                        ),
                    ),
                    _connector="OR",
                ),
                name="recovery_failure_has_a_disposition",
            ),
        ),
        migrations.AddConstraint(
            model_name="recovery",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("state", "exhausted"), _negated=True),
                    ("disposition", "use_alternative_strategy"),
                    _connector="OR",
                ),
                name="recovery_exhausted_says_what_to_do",
            ),
        ),
        migrations.AddConstraint(
            model_name="recovery",
            constraint=models.CheckConstraint(
                condition=models.Q(("attempts__lte", 6)), name="recovery_tries_six_times"
            ),
        ),
        migrations.AddConstraint(
            model_name="recovery",
            constraint=models.UniqueConstraint(fields=("lease", "generation"), name="recovery_generation_is_one"),
        ),
        migrations.AddConstraint(
            model_name="recovery",
            constraint=models.UniqueConstraint(
                condition=models.Q(("state", "running")), fields=("lease",), name="recovery_is_one_per_lease"
            ),
        ),
        migrations.AddIndex(
            model_name="continuation",
            index=models.Index(condition=models.Q(("state", "waiting")), fields=["issue"], name="continuation_waiting"),
        ),
        migrations.AddConstraint(
            model_name="continuation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("ended_at__isnull", True),
                        ("readiness", ""),
                        ("started_run__isnull", True),
                        ("state", "waiting"),
                    ),
                    models.Q(
                        ("ended_at__isnull", False),
                        ("hold", ""),
                        ("started_run__isnull", False),
                        ("state", "started"),
                        models.Q(("readiness", ""), _negated=True),
                    ),
                    models.Q(
                        ("ended_at__isnull", False),
                        ("readiness", ""),
                        ("started_run__isnull", True),
                        ("state", "withdrawn"),
                    ),
                    _connector="OR",
                ),
                name="continuation_starts_one_run",
            ),
        ),
        migrations.AddConstraint(
            model_name="continuation",
            constraint=models.CheckConstraint(
                condition=models.Q(("withdrawn_by", ""), ("state", "withdrawn"), _connector="XOR"),
                name="continuation_is_withdrawn_by_somebody",
            ),
        ),
        migrations.AddConstraint(
            model_name="continuation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("authored_at__isnull", True), ("kind", "retry"), ("message_id", "")),
                    models.Q(
                        ("authored_at__isnull", False),
                        ("kind__in", ["comment", "queued_message"]),
                        models.Q(("message_id", ""), _negated=True),
                    ),
                    _connector="OR",
                ),
                name="continuation_message_says_when",
            ),
        ),
        migrations.AddConstraint(
            model_name="continuation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "retry"), ("state__in", ["waiting", "started"])),
                fields=("run",),
                name="continuation_retries_a_run_once",
            ),
        ),
        migrations.AddConstraint(
            model_name="continuation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("message_id", ""), _negated=True),
                fields=("company", "message_id"),
                name="continuation_is_one_per_message",
            ),
        ),
        migrations.AddConstraint(
            model_name="archive",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("saved_at__isnull", True), ("sha256", ""), ("size__isnull", True)),
                    models.Q(
                        ("saved_at__isnull", False), ("size__isnull", False), models.Q(("sha256", ""), _negated=True)
                    ),
                    _connector="OR",
                ),
                name="archive_is_saved_whole",
            ),
        ),
        migrations.AddConstraint(
            model_name="archive",
            constraint=models.CheckConstraint(
                condition=models.Q(("receipt__isnull", True), ("saved_at__isnull", False), _connector="OR"),
                name="archive_is_sealed_when_saved",
            ),
        ),
        migrations.AddIndex(
            model_name="recoveryaction",
            index=models.Index(
                condition=models.Q(("closed_at__isnull", True)), fields=["issue"], name="recovery_action_open"
            ),
        ),
        migrations.AddConstraint(
            model_name="recoveryaction",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("closed_at__isnull", True), ("closed_by", "")),
                    models.Q(("closed_at__isnull", False), models.Q(("closed_by", ""), _negated=True)),
                    _connector="OR",
                ),
                name="recovery_action_is_closed_by_somebody",
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
