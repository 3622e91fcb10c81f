"""One acquire in a process of its own, to be killed in the middle: its arguments are environment, company and run."""

from __future__ import annotations

import sys
from uuid import UUID

import django


def main() -> None:
    django.setup()
    import leases

    environment, company, run = (UUID(text) for text in sys.argv[1:])
    leases.acquire(environment, company_id=company, run_id=run, actor="demo")


if __name__ == "__main__":
    main()
