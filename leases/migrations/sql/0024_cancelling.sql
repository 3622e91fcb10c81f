-- What waits for the end of a run, woken by every fact that may be the last one. Conventions as in 0002_rules.sql.

-- 1. Of several runs at once: first the confirmations, then the continuations, each in the order of the rows, so that two
--    that wake the same ones cannot deadlock, whatever the runs have in common.
CREATE FUNCTION leases_wake_ends_of_runs(p_runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o
         WHERE o.run_id = ANY (p_runs) AND o.kind = 'confirm_cancel' AND o.closed_at IS NULL
         ORDER BY o.id
    ) waiting;
    PERFORM leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_continuation c JOIN leases_obligation o ON o.continuation_id = c.id
         WHERE c.issue_id IN (SELECT r.issue_id FROM leases_run r WHERE r.id = ANY (p_runs))
           AND c.state = 'waiting' AND o.closed_at IS NULL
         ORDER BY o.id
    ) waiting;
END $$;
CREATE OR REPLACE FUNCTION leases_wake_end_of_run(p_run uuid) RETURNS void LANGUAGE sql AS $$
    SELECT leases_wake_ends_of_runs(ARRAY[p_run]);
$$;

-- 2. A lease is of one run, and another run may have asked for a start of its sandbox: what that one left behind ends with
--    the proof of this lease too, and with its successor.
CREATE FUNCTION leases_wake_ends_by_lease(p_run uuid, p_lease uuid) RETURNS void LANGUAGE sql AS $$
    SELECT leases_wake_ends_of_runs(ARRAY(
        SELECT p_run WHERE p_run IS NOT NULL
        UNION SELECT op.run_uuid FROM leases_operation op WHERE op.source_id = p_lease AND op.run_uuid IS NOT NULL
    ));
$$;
CREATE OR REPLACE FUNCTION leases_lease_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_recovery(NEW.id);
    PERFORM leases_wake_ends_by_lease(NEW.run_id, NEW.id);
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION leases_receipt_proves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_recovery(NEW.lease_id);
    PERFORM leases_wake_ends_by_lease(NEW.run_uuid, NEW.lease_id);
    RETURN NULL;
END $$;

-- 3. While a start is pending, no receipt of its sandbox is proof, whichever lease of that sandbox has it.
CREATE OR REPLACE FUNCTION leases_start_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.source_id IS NOT NULL THEN
        PERFORM leases_wake_recovery(NEW.source_id);
    END IF;
    PERFORM leases_wake_ends_of_runs(ARRAY(
        SELECT NEW.run_uuid WHERE NEW.run_uuid IS NOT NULL
        UNION SELECT l.run_id FROM leases_lease l
               WHERE NEW.kind = 'start' AND l.resource_id = NEW.resource_id AND l.account_id = NEW.account_id
                 AND l.run_id IS NOT NULL
    ));
    RETURN NULL;
END $$;

-- 4. A cancellation, asked for and confirmed, is a fact that continuations wait for, and nobody's lease waits for an
--    acknowledgement by whoever had the whole run cancelled.
DROP TRIGGER run_written_wakes_what_waits ON leases_run;
CREATE TRIGGER run_written_wakes_what_waits
    AFTER UPDATE OF status, finished_at, agent, adapter, issue_id, cancel_requested_at, cancel_confirmed_at ON leases_run
    FOR EACH ROW WHEN (
        OLD.status <> NEW.status OR OLD.finished_at IS DISTINCT FROM NEW.finished_at OR OLD.agent <> NEW.agent
        OR OLD.adapter <> NEW.adapter OR OLD.issue_id IS DISTINCT FROM NEW.issue_id
        OR OLD.cancel_requested_at IS DISTINCT FROM NEW.cancel_requested_at
        OR OLD.cancel_confirmed_at IS DISTINCT FROM NEW.cancel_confirmed_at
    )
    EXECUTE FUNCTION leases_run_moved();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_written_wakes_what_waits;

DROP TRIGGER acknowledgement_wakes_orphans ON leases_run;
CREATE TRIGGER acknowledgement_wakes_orphans AFTER UPDATE ON leases_run
    FOR EACH ROW WHEN (NEW.cancel_acknowledged_at IS DISTINCT FROM OLD.cancel_acknowledged_at
                       OR NEW.cancel_requested_at IS DISTINCT FROM OLD.cancel_requested_at)
    EXECUTE FUNCTION leases_cancellation_acknowledged();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER acknowledgement_wakes_orphans;

-- 5. What was confirmed stays so, and what was asked for is not taken back.
CREATE TRIGGER run_cancellation_is_final BEFORE UPDATE OF cancel_requested_at, cancel_confirmed_at ON leases_run
    FOR EACH ROW WHEN (
        OLD.cancel_requested_at IS NOT NULL AND NEW.cancel_requested_at IS DISTINCT FROM OLD.cancel_requested_at
        OR OLD.cancel_confirmed_at IS NOT NULL AND NEW.cancel_confirmed_at IS DISTINCT FROM OLD.cancel_confirmed_at
    )
    EXECUTE FUNCTION leases_is_final();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_cancellation_is_final;
