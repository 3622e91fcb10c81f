import datetime as dt
import uuid
from pathlib import Path

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

SQL = (Path(__file__).parent / "sql" / "0008_holds.sql").read_text(encoding="utf-8")


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0007_facts_that_end"),
    ]

    operations = [
        migrations.CreateModel(
            name="Hold",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("export_resume", "an export that resumes it is under way"),
                            ("restore_recovery", "its files are still to be restored"),
                            ("recovery_cleanup", "the clean-up of a recovery refers to it"),
                            ("recovery_source", "a recovery reads from it"),
                            ("shutdown_fence", "its controller went down and may still save it"),
                            ("operator", "an operator keeps it"),
                            ("export", "an export is waiting for it"),
                            ("preservation", "its files are being preserved"),
                            ("recovery_action", "a recovery action is open"),
                        ],
                        max_length=20,
                    ),
                ),
                ("strength", models.CharField(choices=[("always", "Always"), ("soft", "Soft")], max_length=6)),
                ("holder", models.CharField(help_text="Who needs it.", max_length=200)),
                ("reason", models.CharField(blank=True, max_length=500)),
                (
                    "until",
                    models.DateTimeField(
                        blank=True, help_text="When it ends by itself; empty: when it is ended.", null=True
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
                ),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                ("ended_by", models.CharField(blank=True, max_length=200)),
            ],
        ),
        migrations.RemoveConstraint(
            model_name="obligation",
            name="obligation_verb_is_a_teardowns",
        ),
        migrations.RemoveConstraint(
            model_name="obligation",
            name="obligation_has_the_subject_of_its_kind",
        ),
        migrations.AddField(
            model_name="environment",
            name="retain_for",
            field=models.DurationField(
                blank=True,
                default=dt.timedelta(days=30),
                help_text="How long a stopped sandbox is kept for its files. Empty: until an operator decides.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="environment",
            name="reuse_idle_for",
            field=models.DurationField(
                default=dt.timedelta(days=7),
                help_text="How long a stopped sandbox waits for its next run, then it is destroyed.",
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="calm_until",
            field=models.DateTimeField(
                blank=True,
                help_text="Until then no hold lapses and no inventory deletes (after a failover).",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="gap_ended_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When holds could be renewed again after an outage of ours: each stands one full length from then.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="installation",
            name="hinted_until",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="installation",
            name="mark",
            field=models.UUIDField(default=uuid.uuid4, editable=False),
        ),
        migrations.AddField(
            model_name="lease",
            name="kept_until",
            field=models.DateTimeField(
                blank=True, help_text="When a kept sandbox is destroyed; empty: when an operator decides.", null=True
            ),
        ),
        migrations.AddField(
            model_name="lease",
            name="orphaned_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When nobody held it any more: it is destroyed as soon as nothing needs its files.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="lease",
            name="retain_for",
            field=models.DurationField(blank=True, default=dt.timedelta(days=30), null=True),
        ),
        migrations.AddField(
            model_name="lease",
            name="reuse_idle_for",
            field=models.DurationField(default=dt.timedelta(days=7)),
        ),
        migrations.AddField(
            model_name="obligation",
            name="held_verb",
            field=models.CharField(
                blank=True,
                choices=[
                    ("stop_only", "stop, never delete"),
                    ("stop_or_delete", "stop, delete if that fails"),
                    ("delete", "Delete"),
                ],
                help_text="What was demanded before a hold forbade it.",
                max_length=20,
            ),
        ),
        migrations.AddField(
            model_name="obligation",
            name="installation",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="obligations",
                to="leases.installation",
            ),
        ),
        migrations.AddField(
            model_name="obligation",
            name="not_before",
            field=models.DateTimeField(
                blank=True, help_text="No wake makes it due earlier; only a person's request does.", null=True
            ),
        ),
        migrations.AddField(
            model_name="operation",
            name="retain_for",
            field=models.DurationField(blank=True, default=dt.timedelta(days=30), null=True),
        ),
        migrations.AddField(
            model_name="operation",
            name="reuse_idle_for",
            field=models.DurationField(default=dt.timedelta(days=7)),
        ),
        migrations.AddField(
            model_name="run",
            name="cancel_acknowledged_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When the control plane took note that a cancelled startup came to its end.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="controller_seconds",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="Seconds: the length of the controller's hold, which each renewal gives anew.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="restore_failed_at",
            field=models.DateTimeField(
                blank=True, help_text="When a shutdown fence ended before the files were saved.", null=True
            ),
        ),
        migrations.AlterField(
            model_name="activityentry",
            name="company",
            field=models.ForeignKey(
                blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.company"
            ),
        ),
        migrations.AlterField(
            model_name="attempt",
            name="company",
            field=models.ForeignKey(
                blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.company"
            ),
        ),
        migrations.AlterField(
            model_name="attempt",
            name="outcome",
            field=models.CharField(
                blank=True,
                choices=[
                    ("proven", "Proven"),
                    ("failed", "Failed"),
                    ("busy", "Busy"),
                    ("draining", "Draining"),
                    ("not_seen", "not seen yet"),
                    ("extended", "the provider's deadline was moved"),
                    ("held", "somebody still needs it, or its time has not come"),
                    ("nothing_owed", "nothing owed any more"),
                    ("handed_over", "handed over"),
                    ("handed_back", "handed back unworked"),
                    ("quieted", "a person is needed"),
                    ("waiting", "waits for what other rows say"),
                    ("superseded", "its protection ended and another attempt took over"),
                ],
                max_length=12,
            ),
        ),
        migrations.AlterField(
            model_name="obligation",
            name="account",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="obligations",
                to="leases.provideraccount",
            ),
        ),
        migrations.AlterField(
            model_name="obligation",
            name="company",
            field=models.ForeignKey(
                blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, to="leases.company"
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
                ],
                max_length=20,
            ),
        ),
        migrations.AlterField(
            model_name="obligation",
            name="quiet",
            field=models.CharField(
                blank=True,
                choices=[
                    ("creation_not_found", "look for it at the provider: its creation window passed unseen"),
                    ("no_lookup", "find the sandbox by hand: this provider cannot look a creation up by name"),
                    ("foreign_marks", "the sandbox carries another installation's marks; decide whose it is"),
                    ("identity_conflict", "a live lease already owns the sandbox that answered; decide whose it is"),
                    ("invalid_snapshot", "the recorded configuration no longer fits the provider's schema"),
                    ("credential_inactive", "enable the credential: it is disabled, archived or not yet valid"),
                    ("credential_missing", "provide the credential: it was deleted, or its store has none"),
                    ("credential_changed", "the secret is another one than the creation was asked with"),
                    ("company_closed", "the company was closed; decide what becomes of its sandbox"),
                    (
                        "mass_lapse",
                        "an unlikely share of the controllers lapsed at once: an outage of ours, or theirs?",
                    ),
                    ("unacknowledged", "a cancelled startup of the run ended, and nobody acknowledged it"),
                    ("operator_decides", "kept until you decide: destroy it, or say until when it is kept"),
                    (
                        "deadline_fixed",
                        "the provider will end it at its own deadline although it is held: save its files",
                    ),
                    ("history_unverified", "no proof of its end was found in days: look at the provider"),
                    ("observing", "this database may be a restored or copied one: say which (trust_database)"),
                    ("waiting", "nothing to decide: woken when what it waits for ends"),
                ],
                max_length=20,
            ),
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(
                condition=models.Q(("status__in", ["queued", "scheduled_retry", "running"])),
                fields=["issue"],
                name="run_live_of_issue",
            ),
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(
                condition=models.Q(
                    ("controller_expires_at__isnull", False), ("status__in", ["queued", "scheduled_retry", "running"])
                ),
                fields=["controller_expires_at"],
                name="run_controlled",
            ),
        ),
        migrations.AddConstraint(
            model_name="environment",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("reuse_idle_for__gt", dt.timedelta(0)),
                    models.Q(("retain_for__isnull", True), ("retain_for__gt", dt.timedelta(0)), _connector="OR"),
                ),
                name="environment_keeps_for_a_time",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("installation__isnull", True),
                        (
                            "kind__in",
                            ["teardown", "extend", "end_lease", "settle_orphan", "dispose", "end_fence", "verify_end"],
                        ),
                        ("lease__isnull", False),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("installation__isnull", True),
                        ("kind__in", ["recover_creation", "recover_start"]),
                        ("lease__isnull", True),
                        ("operation__isnull", False),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("installation__isnull", True),
                        ("kind", "startup"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", False),
                    ),
                    models.Q(
                        ("installation__isnull", False),
                        ("kind", "watch_controllers"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
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
                        ["startup", "end_lease", "settle_orphan", "dispose", "end_fence", "watch_controllers"],
                    ),
                    _connector="OR",
                ),
                name="obligation_names_whom_it_calls",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(("company__isnull", False), ("installation__isnull", False), _connector="OR"),
                name="obligation_names_its_company",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind", "teardown"), ("verb__in", ["stop_only", "stop_or_delete", "delete"])),
                    models.Q(
                        models.Q(("kind", "teardown"), _negated=True),
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
            constraint=models.UniqueConstraint(
                condition=models.Q(("closed_at__isnull", True), ("installation__isnull", False)),
                fields=("installation", "kind"),
                name="obligation_is_one_per_installation_and_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="run",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("controller_expires_at__isnull", True),
                    models.Q(models.Q(("controller_id", ""), _negated=True), ("controller_seconds__isnull", False)),
                    _connector="OR",
                ),
                name="run_hold_names_its_controller",
            ),
        ),
        migrations.AddField(
            model_name="hold",
            name="company",
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="leases.company"),
        ),
        migrations.AddField(
            model_name="hold",
            name="issue",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="holds",
                to="leases.issue",
            ),
        ),
        migrations.AddField(
            model_name="hold",
            name="lease",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="holds",
                to="leases.lease",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("issue__isnull", True), ("lease__isnull", False)),
                    models.Q(("issue__isnull", False), ("lease__isnull", True)),
                    _connector="OR",
                ),
                name="hold_is_on_a_lease_or_an_issue",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        (
                            "kind__in",
                            [
                                "export_resume",
                                "restore_recovery",
                                "recovery_cleanup",
                                "recovery_source",
                                "shutdown_fence",
                                "operator",
                            ],
                        ),
                        ("strength", "always"),
                    ),
                    models.Q(("kind__in", ["export", "preservation", "recovery_action"]), ("strength", "soft")),
                    _connector="OR",
                ),
                name="hold_has_the_strength_of_its_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind__in", ["operator", "shutdown_fence"]), _negated=True),
                    ("until__isnull", False),
                    _connector="OR",
                ),
                name="hold_is_reviewed_or_ended",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind", "shutdown_fence"), _negated=True), ("lease__isnull", False), _connector="OR"
                ),
                name="hold_that_fences_is_on_a_lease",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("ended_at__isnull", True), ("ended_by", "")),
                    models.Q(("ended_at__isnull", False), models.Q(("ended_by", ""), _negated=True)),
                    _connector="OR",
                ),
                name="hold_is_ended_by_somebody",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.UniqueConstraint(
                condition=models.Q(("ended_at__isnull", True), ("lease__isnull", False)),
                fields=("lease", "kind", "holder"),
                name="hold_is_one_per_lease_kind_and_holder",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.UniqueConstraint(
                condition=models.Q(("ended_at__isnull", True), ("issue__isnull", False)),
                fields=("issue", "kind", "holder"),
                name="hold_is_one_per_issue_kind_and_holder",
            ),
        ),
        migrations.RunSQL(SQL, migrations.RunSQL.noop),
    ]
