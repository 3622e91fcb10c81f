import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0002_rules"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="obligation",
            options={"permissions": [("settle_unverified", "Can settle obligation without proof")]},
        ),
        migrations.RemoveConstraint(
            model_name="bridgeactivity",
            name="activity_ends_with_an_outcome",
        ),
        migrations.RemoveConstraint(
            model_name="credential",
            name="credential_is_a_reference",
        ),
        migrations.RemoveConstraint(
            model_name="obligation",
            name="obligation_has_the_subject_of_its_kind",
        ),
        migrations.RemoveConstraint(
            model_name="operation",
            name="operation_name_is_unique",
        ),
        migrations.RemoveConstraint(
            model_name="operation",
            name="operation_state_is_known",
        ),
        migrations.RemoveConstraint(
            model_name="operation",
            name="operation_resolved_says_when",
        ),
        migrations.AddField(
            model_name="bridgeactivity",
            name="operation",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="activities",
                to="leases.operation",
            ),
        ),
        migrations.AddField(
            model_name="credential",
            name="digest",
            field=models.CharField(
                blank=True, editable=False, help_text="Keyed digest of the value last seen to work.", max_length=64
            ),
        ),
        migrations.AddField(
            model_name="lease",
            name="credential_uuid",
            field=models.UUIDField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="lease",
            name="ends_at",
            field=models.DateTimeField(blank=True, help_text="An ad-hoc lease is released then by itself.", null=True),
        ),
        migrations.AddField(
            model_name="lease",
            name="fingerprint",
            field=models.CharField(blank=True, help_text="Digest of what the sandbox was made from.", max_length=64),
        ),
        migrations.AddField(
            model_name="lease",
            name="scope",
            field=models.CharField(
                blank=True, help_text="What may use the sandbox again; empty: nothing.", max_length=200
            ),
        ),
        migrations.AddField(
            model_name="lease",
            name="started_as_of",
            field=models.DateTimeField(
                blank=True,
                help_text="The provider's own time of the last start it confirmed; what is older is stale.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="lease",
            name="successor",
            field=models.OneToOneField(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="predecessor",
                to="leases.lease",
            ),
        ),
        migrations.AddField(
            model_name="obligation",
            name="absent_since",
            field=models.DateTimeField(
                blank=True,
                help_text="When the first of the looks in a row was that did not find the sandbox.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="obligation",
            name="run",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="obligations",
                to="leases.run",
            ),
        ),
        migrations.AddField(
            model_name="operation",
            name="binding",
            field=models.CharField(blank=True, help_text="The adapter's own, opaque.", max_length=200),
        ),
        migrations.AddField(
            model_name="operation",
            name="call_ended_at",
            field=models.DateTimeField(
                blank=True, help_text="When its caller said that it asks the provider for nothing any more.", null=True
            ),
        ),
        migrations.AddField(
            model_name="operation",
            name="credential_digest",
            field=models.CharField(blank=True, max_length=64),
        ),
        migrations.AddField(
            model_name="operation",
            name="credential_uuid",
            field=models.UUIDField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="operation",
            name="ends_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="operation",
            name="fingerprint",
            field=models.CharField(blank=True, max_length=64),
        ),
        migrations.AddField(
            model_name="operation",
            name="kind",
            field=models.CharField(choices=[("create", "Create"), ("start", "Start")], default="create", max_length=10),
        ),
        migrations.AddField(
            model_name="operation",
            name="outlived_at",
            field=models.DateTimeField(
                blank=True, help_text="When it was found that its caller does not get the sandbox.", null=True
            ),
        ),
        migrations.AddField(
            model_name="operation",
            name="proves_no_allocation",
            field=models.JSONField(
                default=list, help_text="Error kinds with which an answer may prove that nothing was allocated."
            ),
        ),
        migrations.AddField(
            model_name="operation",
            name="request_key",
            field=models.CharField(
                blank=True,
                help_text="The caller's own name of its request: it is served once.",
                max_length=200,
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="operation",
            name="scope",
            field=models.CharField(blank=True, max_length=200),
        ),
        migrations.AddField(
            model_name="operation",
            name="source",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="starts",
                to="leases.lease",
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
            model_name="bridgeactivity",
            name="lease",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="activities",
                to="leases.lease",
            ),
        ),
        migrations.AlterField(
            model_name="bridgeactivity",
            name="outcome",
            field=models.CharField(
                blank=True,
                choices=[
                    ("completed", "Completed"),
                    ("failed", "Failed"),
                    ("backed_out", "backed out: the lease was released before it began"),
                    ("lost", "lost: nobody told its end, and its sandbox ended"),
                ],
                max_length=12,
            ),
        ),
        migrations.AlterField(
            model_name="credential",
            name="reference",
            field=models.CharField(
                help_text="A reference, such as env:NAME or file:/absolute/path; never the secret itself.",
                max_length=500,
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
                    ("waiting", "nothing to decide: woken when what it waits for ends"),
                ],
                max_length=20,
            ),
        ),
        migrations.AlterField(
            model_name="operation",
            name="lease",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="operations",
                to="leases.lease",
            ),
        ),
        migrations.AlterField(
            model_name="operation",
            name="lease_uuid",
            field=models.UUIDField(),
        ),
        migrations.AlterField(
            model_name="operation",
            name="state",
            field=models.CharField(
                choices=[
                    ("pending", "the provider may have allocated or started a sandbox that no lease owns"),
                    ("attached", "a lease owns the sandbox"),
                    ("resolved", "nothing is owned any more, or nothing was ever allocated or started"),
                    ("unverified", "an operator ended the search; whether a sandbox exists is not known"),
                ],
                default="pending",
                max_length=10,
            ),
        ),
        migrations.AddIndex(
            model_name="bridgeactivity",
            index=models.Index(
                condition=models.Q(("ended_at__isnull", True), ("operation__isnull", False)),
                fields=["operation"],
                name="activity_open_of_startup",
            ),
        ),
        migrations.AddIndex(
            model_name="lease",
            index=models.Index(
                condition=models.Q(("state", "released"), models.Q(("scope", ""), _negated=True)),
                fields=["company", "scope", "-released_at"],
                name="lease_reusable",
            ),
        ),
        migrations.AddConstraint(
            model_name="bridgeactivity",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("ended_at__isnull", True), ("outcome", "")),
                    models.Q(
                        ("ended_at__isnull", False), ("outcome__in", ["completed", "failed", "backed_out", "lost"])
                    ),
                    _connector="OR",
                ),
                name="activity_ends_with_an_outcome",
            ),
        ),
        migrations.AddConstraint(
            model_name="bridgeactivity",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("lease__isnull", False), ("operation__isnull", True)),
                    models.Q(("lease__isnull", True), ("operation__isnull", False)),
                    _connector="OR",
                ),
                name="activity_is_of_a_lease_or_a_startup",
            ),
        ),
        migrations.AddConstraint(
            model_name="credential",
            constraint=models.CheckConstraint(
                condition=models.Q(("reference__regex", "^[a-z][a-z0-9_.-]*:.+$")), name="credential_is_a_reference"
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("successor__isnull", True), ("state", "expired"), _connector="OR"),
                name="lease_succeeded_is_expired",
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("scope", ""), ("run__isnull", False), _connector="OR"),
                name="lease_of_no_run_is_not_reused",
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("ends_at__isnull", True), ("run__isnull", True), _connector="OR"),
                name="lease_that_ends_by_itself_is_ad_hoc",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("kind__in", ["teardown", "extend", "end_lease"]),
                        ("lease__isnull", False),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("kind__in", ["recover_creation", "recover_start"]),
                        ("lease__isnull", True),
                        ("operation__isnull", False),
                        ("probed_account__isnull", True),
                        ("run__isnull", True),
                    ),
                    models.Q(
                        ("kind", "startup"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account__isnull", True),
                        ("run__isnull", False),
                    ),
                    models.Q(
                        ("kind", "probe_account"),
                        ("lease__isnull", True),
                        ("operation__isnull", True),
                        ("probed_account", models.F("account")),
                        ("run__isnull", True),
                    ),
                    _connector="OR",
                ),
                name="obligation_has_the_subject_of_its_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind", "teardown"), ("absent_since__isnull", True), _connector="OR"),
                name="obligation_absence_is_a_teardowns",
            ),
        ),
        migrations.AddConstraint(
            model_name="obligation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("closed_at__isnull", True), ("run__isnull", False)),
                fields=("run", "kind"),
                name="obligation_is_one_per_run_and_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "create")), fields=("account", "name"), name="operation_name_is_unique"
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "create")), fields=("lease_uuid",), name="operation_creates_one_lease"
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "create")), fields=("lease",), name="operation_created_its_lease"
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                fields=("company", "request_key"), name="operation_serves_a_request_once"
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "start"), ("state", "pending")),
                fields=("account", "resource_id"),
                name="operation_is_the_only_start_of_its_sandbox",
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["create", "start"])), name="operation_kind_is_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind", "create"), ("source__isnull", True)),
                    models.Q(
                        ("kind", "start"), ("source__isnull", False), models.Q(("resource_id", ""), _negated=True)
                    ),
                    _connector="OR",
                ),
                name="operation_start_names_its_sandbox",
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["pending", "attached", "resolved", "unverified"])),
                name="operation_state_is_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("resolved_at__isnull", False), ("state__in", ["resolved", "unverified"])),
                    models.Q(
                        models.Q(("state__in", ["resolved", "unverified"]), _negated=True),
                        ("resolved_at__isnull", True),
                    ),
                    _connector="OR",
                ),
                name="operation_resolved_says_when",
            ),
        ),
    ]
