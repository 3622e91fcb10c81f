"""The tables. One subject per module; rules that PostgreSQL can hold are constraints, or triggers in the migrations."""

from leases.models.accounts import Credential, ProviderAccount
from leases.models.audit import ActivityEntry
from leases.models.continuation import Continuation, IssueFacts, RecoveryAction, RunFacts
from leases.models.environments import Environment
from leases.models.holds import Hold
from leases.models.inventory import InventoryFinding, InventoryListing
from leases.models.journal import Operation
from leases.models.lease import BridgeActivity, Lease
from leases.models.obligations import Attempt, Obligation
from leases.models.receipts import Receipt
from leases.models.recovery import Archive, Recovery
from leases.models.tenancy import Company, Installation, Issue, Run

__all__ = [
    "ActivityEntry",
    "Archive",
    "Attempt",
    "BridgeActivity",
    "Company",
    "Continuation",
    "Credential",
    "Environment",
    "Hold",
    "Installation",
    "InventoryFinding",
    "InventoryListing",
    "Issue",
    "IssueFacts",
    "Lease",
    "Obligation",
    "Operation",
    "ProviderAccount",
    "Receipt",
    "Recovery",
    "RecoveryAction",
    "Run",
    "RunFacts",
]
