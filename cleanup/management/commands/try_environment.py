"""`manage.py try_environment`: does this environment work? A sandbox, a command in it, its teardown, told by step."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser

from cleanup import trying
from cleanup.management.decision import Wrong, operator_name
from cleanup.trying import Step
from leases.errors import LeaseError
from leases.models import Environment

_DEFAULT = ["sh", "-c", "echo it works; id; uname -a"]


class Command(BaseCommand):
    help = (
        "Try an environment: acquire a sandbox of it, run a command, tear it down, and wait for the proof. "
        "Exit status 1 when a step failed or something is still owed."
    )

    stealth_options = ("argv",)
    """For `call_command`: the program and its arguments, which follow -- on a command line."""

    _argv: Sequence[str] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("environment", help="its id, or its name where only one has it")
        parser.add_argument("--company", type=UUID, help="only this company's (its id)")
        parser.add_argument("--timeout", type=float, default=60.0, help="seconds for the command (60)")
        parser.add_argument("--within", type=float, default=300.0, help="seconds to wait for the proof (300)")
        parser.add_argument("--dry-run", action="store_true", help="only show what would be asked for; asks nobody")
        parser.add_argument("--json", action="store_true", help="print one JSON object for each step")

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs["epilog"] = "After --, the program to run and its arguments: try_environment NAME -- python -V"
        return super().create_parser(prog_name, subcommand, **kwargs)

    def run_from_argv(self, argv: list[str]) -> None:
        # argparse takes what follows -- for unknown arguments where options stand in between.
        at = argv.index("--") if "--" in argv else len(argv)
        self._argv = argv[at + 1 :]
        super().run_from_argv(argv[:at])

    def handle(self, *_: Any, **options: Any) -> None:
        for name in ("timeout", "within"):
            if not 0 < options[name] <= 3600:  # noqa: PLR2004 - an hour
                raise Wrong(f"--{name}: must be more than 0 and at most 3600 seconds")
        argv = list(options.get("argv") or self._argv)
        environment = self._environment(options)
        if options["dry_run"]:
            self._plan(environment, argv, as_json=options["json"])
            return
        steps = trying.try_environment(
            environment.pk,
            company_id=environment.company_id,
            argv=argv,
            timeout=options["timeout"],
            within=options["within"],
            actor=operator_name(),
        )
        failed = False
        try:
            for step in steps:
                failed = failed or not step.ok
                self._tell(step, as_json=options["json"])
        except KeyboardInterrupt:
            self.stderr.write("Stopped; what was acquired is released, and its teardown is owed.")
            sys.exit(130)
        except LeaseError as error:
            raise CommandError(str(error)) from error
        finally:
            steps.close()
        if failed:
            sys.exit(1)

    def _environment(self, options: dict[str, Any]) -> Environment:
        name: str = options["environment"]
        rows = Environment.objects.select_related("account", "company")
        if options["company"]:
            rows = rows.filter(company_id=options["company"])
        try:
            found = list(rows.filter(pk=UUID(name)))
        except ValueError:
            found = list(rows.filter(name=name)[:2])
        if not found:
            raise Wrong(f"there is no environment {name}" + (" in this company" if options["company"] else ""))
        if len(found) > 1:
            raise Wrong(f"several environments are named {name}: give the id, or --company")
        return found[0]

    def _plan(self, environment: Environment, argv: list[str], *, as_json: bool) -> None:
        plan = {
            "dry_run": True,
            "environment": str(environment.pk),
            "company": str(environment.company_id),
            "account": environment.account.name,
            "provider": environment.account.provider,
            "config": environment.config,
            "command": argv,
        }
        if as_json:
            self.stdout.write(json.dumps(plan))
            return
        self.stdout.write(
            f"Would acquire a sandbox of {environment} at {environment.account}, run {argv} in it, and destroy it. "
            "Nobody was asked."
        )

    def _tell(self, step: Step, *, as_json: bool) -> None:
        if as_json:
            told = asdict(step) | {"lease_id": str(step.lease_id) if step.lease_id else None}
            if step.execution is not None:
                told["execution"] = asdict(step.execution) | {
                    "stdout": step.execution.stdout.decode(errors="replace"),
                    "stderr": step.execution.stderr.decode(errors="replace"),
                }
            self.stdout.write(json.dumps(told))
            return
        self.stdout.write(f"{'ok' if step.ok else 'FAILED':6}  {step.name:9} {step.seconds:6.1f} s  {step.text}")
        if step.execution is not None:
            for stream in (step.execution.stdout, step.execution.stderr):
                for line in stream.decode(errors="replace").splitlines():
                    self.stdout.write(f"        | {line}")
