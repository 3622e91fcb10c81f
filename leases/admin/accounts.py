"""Credentials, which are references and never secrets, and provider accounts with their limits and circuit."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.utils.safestring import SafeString

from leases import credentials
from leases.admin.removals import Removable
from leases.admin.schemas import ProviderChoice, schema_of, schemas
from leases.admin.stock import CheckedForm, Editable
from leases.admin.times import badge, of_row
from leases.models import Credential, ProviderAccount


class CredentialForm(CheckedForm[Credential]):
    reference = forms.CharField(
        max_length=500,
        widget=forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off", "spellcheck": "false"}),
        help_text="Where the secret is found: env:NAME, file:/absolute/path, or the name of an installed secret store, "
        "a colon, and its name there. Never the secret itself.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        status = self.fields.get("status")
        if status is not None and self.instance.status != Credential.Status.ARCHIVED:
            # Archiving has a page of its own, which lists what depends on it.
            choices = [pair for pair in Credential.Status.choices if pair[0] != Credential.Status.ARCHIVED]
            status.choices = choices  # type: ignore[attr-defined]  # a choice field

    def _post_clean(self) -> None:  # Django's own: after the fields, it asks the model
        super()._post_clean()  # type: ignore[misc]  # not in the stubs
        if "reference" in self.errors:
            # It may be a secret that was pasted by mistake: the page that refuses it does not repeat it.
            self.data = {**self.data.dict(), self.add_prefix("reference"): ""}  # type: ignore[attr-defined]  # a QueryDict


@admin.register(Credential)
class CredentialAdmin(Removable[Credential]):
    form = CredentialForm
    list_display = ("name", "company", "reference", "shown_status", "created")
    list_filter = ("status", "company")
    list_select_related = ("company",)
    search_fields = ("name", "reference", "company__name")
    autocomplete_fields = ("company",)
    ordering = ("name",)
    once_made = ("shown_digest", "depending", "id", "created_at")
    fields = ("company", "name", "reference", "status", *once_made)
    readonly_fields = once_made

    @admin.display(description="value last seen to work")
    def shown_digest(self, credential: Credential) -> str:
        return f"digest {credential.digest[:8]}…" if credential.digest else "none yet"

    @admin.display(description="what depends on it")
    def depending(self, credential: Credential) -> str:
        needed = credentials.dependants(credential)
        told = f"{needed.leases} leases whose sandbox is not proven gone, {needed.operations} unanswered operations"
        return f"{told}; {needed.waiting} obligations wait for a person because of it" if needed.waiting else told

    @admin.display(description="status", ordering="status")
    def shown_status(self, credential: Credential) -> SafeString:
        return badge(
            credential.get_status_display(), "good" if credential.status == Credential.Status.ACTIVE else "plain"
        )

    @admin.display(description="created", ordering="created_at")
    def created(self, credential: Credential) -> SafeString | str:
        return of_row(credential, "created_at")


class AccountForm(CheckedForm[ProviderAccount]):
    same_company = ("credential",)
    provider = ProviderChoice()


@admin.register(ProviderAccount)
class ProviderAccountAdmin(Editable[ProviderAccount]):
    form = AccountForm
    written_once = ("company", "provider")
    list_display = ("name", "provider", "company", "shown_circuit", "blocked", "concurrency_limit", "attested_identity")
    list_filter = ("provider", "circuit", "company")
    list_select_related = ("company",)
    search_fields = ("name", "attested_identity", "company__name")
    autocomplete_fields = ("company", "credential")
    ordering = ("name",)
    once_made = ("attested_identity", "circuit", "circuit_failures", "hinted_until", "id", "created_at")
    readonly_fields = ("expected_endpoint", *once_made)
    fieldsets = (
        (None, {"fields": ("company", "name", "provider", "endpoint", "expected_endpoint", "credential")}),
        ("Limits", {"fields": ("concurrency_limit", "blocked_until")}),
        (
            "Written by the system",
            {"fields": once_made},
        ),
    )

    @admin.display(description="What an endpoint says")
    def expected_endpoint(self, account: ProviderAccount) -> SafeString:
        return schema_of(account.provider, "Endpoint") if account.provider else schemas("Endpoint")

    @admin.display(description="circuit", ordering="circuit")
    def shown_circuit(self, account: ProviderAccount) -> SafeString:
        if account.circuit == ProviderAccount.Circuit.OPEN:
            return badge("open", "bad")
        return badge("closed", "good")

    @admin.display(description="blocked until", ordering="blocked_until")
    def blocked(self, account: ProviderAccount) -> SafeString | str:
        return of_row(account, "blocked_until")
