-- What a look at the finished whole found. Conventions as in 0002_rules.sql.

-- 1. An attempt whose start was never sent is taken back, one at a time: that a worker is not ready consumes none.
DROP TRIGGER recovery_facts_are_final ON leases_recovery;
CREATE TRIGGER recovery_facts_are_final BEFORE UPDATE ON leases_recovery
    FOR EACH ROW WHEN (
        OLD.state <> 'running'
        OR (OLD.company_id, OLD.lease_id, OLD.generation) IS DISTINCT FROM (NEW.company_id, NEW.lease_id, NEW.generation)
        OR NEW.attempts < OLD.attempts - 1
        OR coalesce(NEW.restarted_epoch, 0) < coalesce(OLD.restarted_epoch, 0)
    )
    EXECUTE FUNCTION leases_is_final();
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_facts_are_final;

-- 2. Whether the files are to be saved first is a gate too, whoever writes it.
CREATE FUNCTION leases_continuation_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(o.id) FROM leases_obligation o WHERE o.continuation_id = NEW.id AND o.closed_at IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER continuation_changed_wakes_it AFTER UPDATE OF recovers_files ON leases_continuation
    FOR EACH ROW WHEN (OLD.recovers_files <> NEW.recovers_files)
    EXECUTE FUNCTION leases_continuation_changed();
ALTER TABLE leases_continuation ENABLE ALWAYS TRIGGER continuation_changed_wakes_it;
