-- A shutdown fence holds a sandbox, whichever row of ours names it; so its end wakes the settles of all of them.
-- Conventions as in 0002_rules.sql. In the order of the leases, so that two that wake the same ones cannot deadlock.
CREATE OR REPLACE FUNCTION leases_hold_written() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE h leases_hold;
BEGIN
    IF TG_OP = 'INSERT' THEN h := NEW; ELSE h := OLD; END IF;
    IF h.kind = 'shutdown_fence' THEN
        PERFORM leases_wake(waiting.id) FROM (
            SELECT o.id FROM leases_lease f
              JOIN leases_lease l ON l.resource_id = f.resource_id AND l.provider = f.provider
                                 AND l.account_identity = f.account_identity
              JOIN leases_obligation o ON o.lease_id = l.id
             WHERE f.id = h.lease_id AND o.closed_at IS NULL AND o.kind IN ('dispose', 'settle_orphan')
             ORDER BY l.id, o.id
        ) waiting;
    ELSE
        PERFORM leases_wake_settles(h.lease_id, NULL, h.issue_id);
    END IF;
    RETURN NULL;
END $$;
