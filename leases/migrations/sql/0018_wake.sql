-- What a wake leaves behind. Conventions as in 0002_rules.sql.

-- 1. A wake is no outage. The watch tells from `owed_since` how long after its time it was claimed, so a wake of it that is
--    not overdue begins that time anew: what waited for a person or for another write was not to be looked at before. What
--    is overdue already stays so. Of all other kinds it is the age of the debt, which no wake changes.
CREATE OR REPLACE FUNCTION leases_wake(p_obligation bigint, p_explicit boolean DEFAULT false) RETURNS void
LANGUAGE sql AS $$
    UPDATE leases_obligation
       SET wakes = wakes + 1,
           requests = requests + (CASE WHEN p_explicit THEN 1 ELSE 0 END),
           due_at = CASE WHEN attempt_id IS NOT NULL THEN due_at
                         WHEN p_explicit OR not_before IS NULL THEN least(coalesce(due_at, 'infinity'), now())
                         ELSE least(coalesce(due_at, 'infinity'), greatest(now(), not_before)) END,
           owed_since = CASE WHEN kind = 'watch_controllers' AND attempt_id IS NULL AND (due_at IS NULL OR due_at > now())
                             THEN greatest(owed_since, now()) ELSE owed_since END,
           quiet = CASE WHEN attempt_id IS NULL THEN '' ELSE quiet END
     WHERE id = p_obligation AND closed_at IS NULL;
$$;

-- 2. History of a sandbox that another lease has waits for the end of that one, however it ends, like all that is held by it.
CREATE OR REPLACE FUNCTION leases_other_lease_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o JOIN leases_lease l ON l.id = o.lease_id
         WHERE o.closed_at IS NULL AND o.kind IN ('dispose', 'settle_orphan', 'verify_end') AND l.id <> NEW.id
           AND l.resource_id = NEW.resource_id AND l.provider = NEW.provider
           AND l.account_identity = NEW.account_identity
         ORDER BY l.id, o.id
    ) waiting;
    RETURN NULL;
END $$;
DROP TRIGGER lease_end_wakes_settles ON leases_lease;
CREATE TRIGGER lease_end_wakes_settles AFTER UPDATE ON leases_lease
    FOR EACH ROW WHEN (OLD.state <> NEW.state
                       AND OLD.state IN ('active', 'pending_cleanup', 'retained', 'released')
                       AND NEW.state NOT IN ('active', 'pending_cleanup', 'retained'))
    EXECUTE FUNCTION leases_other_lease_ended();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_end_wakes_settles;
