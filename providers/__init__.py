"""Who is asked: the provider contract, its errors, and one module or package per provider.

Answers for talking to one provider, call by call. It knows nothing of leases, obligations, retries or the
database: those belong to `leases` and `cleanup`, which import this package and never the other way round.
"""
