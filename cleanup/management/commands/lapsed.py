"""`manage.py lapsed`: the live runs whose controllers do not renew any more, and a person's word on what that was."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from cleanup.management.decision import DecisionCommand, Wrong
from leases import controllers
from leases.controllers import Lapsed


class Command(DecisionCommand):
    help = (
        "List the live runs whose controllers' holds have ended. --settle interrupts those runs, and what they hold is"
        " stopped and kept; --extend says that the outage was ours, and lets every hold stand one full length from now."
        " Exit status 0: none has lapsed, or done. 1: some have, or it was refused. 2: wrong arguments."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        decision = parser.add_mutually_exclusive_group()
        decision.add_argument("--settle", action="store_true", help="their controllers are gone: interrupt the runs")
        decision.add_argument("--extend", action="store_true", help="the outage was ours: let all holds stand anew")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if not (options["settle"] or options["extend"]):
            if options["reason"]:
                raise Wrong("--reason goes with --settle or --extend")
            options["dry_run"] = True
            self._list(controllers.lapsed(), as_json=options["json"])
            return
        super().handle(*args, **options)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        found = controllers.lapsed()
        if dry_run:
            what = "interrupted" if options["settle"] else "left alone for one full length of their holds"
            return {"runs": _told(found), "told": f"{_count(found)} would be {what}. Nothing was written."}
        if options["extend"]:
            ended = controllers.extend_lapsed(actor=actor, reason=options["reason"])
            told = f"Every hold stands one full length from {ended:%H:%M:%S} on; {_count(found)} had lapsed."
            return {"runs": _told(found), "gap_ended_at": ended.isoformat(), "told": told}
        done, left = controllers.settle_lapsed(actor=actor, reason=options["reason"])
        told = f"{_count(done)} interrupted."
        if left:
            told += f" {_count(left)} left: renewed, ended or locked at this moment; ask again."
        return {"runs": _told(done), "left": _told(left), "told": told}

    def _list(self, found: list[Lapsed], *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps({"runs": _told(found)}, indent=2))
        else:
            for one in found:
                self.stdout.write(
                    f"run {one.run_id}, held by {one.controller_id} until {one.ended_at:%Y-%m-%d %H:%M:%S} UTC"
                )
            self.stdout.write(f"{_count(found)} lapsed.")
        if found:
            raise SystemExit(1)


def _count(runs: list[Lapsed]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _told(runs: list[Lapsed]) -> list[dict[str, Any]]:
    return [
        {
            "run": str(one.run_id),
            "company": str(one.company_id),
            "controller": one.controller_id,
            "generation": one.generation,
            "ended_at": one.ended_at.isoformat(),
        }
        for one in runs
    ]
