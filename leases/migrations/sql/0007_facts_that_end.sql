-- Facts whose end wakes the row that waits for it. Conventions as in 0002_rules.sql.

-- 1. A teardown waits while a call of a start of its sandbox may still be done. Its caller's word that none can be any
--    more ends that (the bound on the calls ends it too, and that is a time, which the row's own due time covers).
CREATE FUNCTION leases_start_calls_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(o.id) FROM leases_obligation o JOIN leases_lease l ON l.id = o.lease_id
      WHERE l.account_id = NEW.account_id AND l.resource_id = NEW.resource_id
        AND o.kind = 'teardown' AND o.closed_at IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER start_calls_end_wakes_teardown AFTER UPDATE ON leases_operation
    FOR EACH ROW WHEN (NEW.kind = 'start' AND OLD.call_ended_at IS NULL AND NEW.call_ended_at IS NOT NULL)
    EXECUTE FUNCTION leases_start_calls_ended();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER start_calls_end_wakes_teardown;

-- 2. A recovery waits for a person where a live lease of another creation owns the sandbox that answered. The end of that
--    lease ends the conflict. It wakes quiet rows and others alike: one whose attempt is about to make it quiet sees that
--    the count moved since its claim, which was before it looked.
CREATE FUNCTION leases_lease_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_operation op JOIN leases_obligation o ON o.operation_id = op.id
         WHERE op.kind = 'create' AND op.state = 'pending'
           AND op.account_id = NEW.account_id AND op.resource_id = NEW.resource_id AND o.closed_at IS NULL
         ORDER BY o.operation_id
    ) waiting;
    RETURN NULL;
END $$;
CREATE TRIGGER lease_end_wakes_conflicting_recovery AFTER UPDATE ON leases_lease
    FOR EACH ROW WHEN (OLD.state IN ('active', 'pending_cleanup', 'retained')
                       AND NEW.state NOT IN ('active', 'pending_cleanup', 'retained'))
    EXECUTE FUNCTION leases_lease_ended();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_end_wakes_conflicting_recovery;
