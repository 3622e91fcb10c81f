"""`manage.py trust_database`: a person says what a restored or copied database is."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from cleanup import trusting
from cleanup.management.decision import DecisionCommand
from leases import trust


class Command(DecisionCommand):
    help = (
        "End observing. --as-restore: this database is the one and only from now on, whatever it lost. --as-clone: it "
        "is a copy, and the original goes on; all that it owed is the original's, and it gets a mark of its own "
        "(confirm with the present one, which a dry run says). Exit status 1 when it is refused."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--as-restore", action="store_true", help="the original, or what is left of it, is gone")
        what.add_argument("--as-clone", action="store_true", help="the original goes on elsewhere")
        parser.add_argument("--confirm", default="", help="with --as-clone: the present mark of this installation")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        if dry_run:
            return self._would(as_clone=options["as_clone"])
        if options["as_clone"]:
            done = trusting.as_clone(actor=actor, reason=options["reason"], confirmation=options["confirm"])
            told = (
                f"This database is a clone, and marks its sandboxes with {done.mark} from now on. {done.leases} leases "
                f"and {done.operations} starts of the original are disowned: nothing here touches their sandboxes."
            )
        else:
            done = trusting.as_restore(actor=actor, reason=options["reason"])
            told = f"This database is trusted. {done.woken} obligations that were left alone are due now."
        kept = " and ".join(done.kept_in) or "no place that can be reached from here; the beat keeps it"
        return {
            "mark": str(done.mark),
            "kept_in": list(done.kept_in),
            "woken": done.woken,
            "leases": done.leases,
            "operations": done.operations,
            "told": f"{told} The high-water mark is in {kept}.",
        }

    def _would(self, *, as_clone: bool) -> dict[str, Any]:
        found = trusting.examine()
        why = trust.observing_label(found.trust.why) if found.trust.is_observing else ""
        stands = f"This database observes: {why}." if why else "This database does not observe."
        if as_clone:
            would = (
                f"{found.leases} leases and {found.operations} starts would be disowned; "
                f"confirm with --confirm {found.mark}."
            )
            if found.own:
                would = f"{len(found.own)} leases that it acquired itself have to be released first."
        elif not why:
            would = "There is nothing to trust."
        else:
            would = f"{found.waiting} obligations that are left alone would be due."
        return {
            "observing": found.trust.is_observing,
            "why": found.trust.why,
            "confirm": str(found.mark),
            "waiting": found.waiting,
            "leases": found.leases,
            "operations": found.operations,
            "own": [str(pk) for pk in found.own],
            "told": f"{stands} {would} Nothing was written.",
        }
