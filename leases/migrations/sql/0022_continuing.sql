-- A run that continues another is alone on its issue, and what else its admission waits for. Conventions as in 0002_rules.sql.

-- 1. A run that comes to life on an issue takes the issue FOR KEY SHARE before it is there. Its foreign keys would do so at
--    commit, which is too late: an admission that took the issue FOR UPDATE meanwhile would not see the run and start a
--    second one. Under that lock it looks, with a snapshot that is younger than the lock, whether either of the two runs
--    continues another. One that does takes the issue FOR UPDATE itself, as the admission has it already. Runs of which
--    none continues another do not exclude each other.
CREATE FUNCTION leases_run_comes_to_life() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.continues_id IS NULL THEN
        PERFORM 1 FROM leases_issue i WHERE i.id = NEW.issue_id FOR KEY SHARE;
    ELSE
        PERFORM 1 FROM leases_issue i WHERE i.id = NEW.issue_id FOR UPDATE;
    END IF;
    IF EXISTS (SELECT 1 FROM leases_run r
                WHERE r.issue_id = NEW.issue_id AND r.id <> NEW.id AND r.status IN ('queued', 'scheduled_retry', 'running')
                  AND (r.continues_id IS NOT NULL OR NEW.continues_id IS NOT NULL)) THEN
        RAISE EXCEPTION 'a run that continues another is the only live one of issue %', NEW.issue_id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'run_continuing_is_alone_on_its_issue';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER run_is_born_alone BEFORE INSERT ON leases_run
    FOR EACH ROW WHEN (NEW.issue_id IS NOT NULL AND NEW.status IN ('queued', 'scheduled_retry', 'running'))
    EXECUTE FUNCTION leases_run_comes_to_life();
CREATE TRIGGER run_comes_to_life_alone BEFORE UPDATE ON leases_run
    FOR EACH ROW WHEN (
        NEW.issue_id IS NOT NULL AND NEW.status IN ('queued', 'scheduled_retry', 'running')
        AND (OLD.status NOT IN ('queued', 'scheduled_retry', 'running') OR OLD.issue_id IS DISTINCT FROM NEW.issue_id
             OR OLD.continues_id IS DISTINCT FROM NEW.continues_id)
    )
    EXECUTE FUNCTION leases_run_comes_to_life();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_is_born_alone;
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_comes_to_life_alone;

-- 2. The end of a shutdown fence: until then the controller that went down may still save the files, on any lease of the
--    same sandbox.
CREATE FUNCTION leases_fence_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_end_of_run(fenced.run_id) FROM (
        SELECT DISTINCT o.run_id FROM leases_lease l
          JOIN leases_lease o ON o.resource_id = l.resource_id AND o.provider = l.provider
                             AND o.account_identity = l.account_identity
         WHERE l.id = OLD.lease_id AND o.run_id IS NOT NULL
         ORDER BY o.run_id
    ) fenced;
    RETURN NULL;
END $$;
CREATE TRIGGER fence_end_wakes_continuations AFTER UPDATE OR DELETE ON leases_hold
    FOR EACH ROW WHEN (OLD.kind = 'shutdown_fence' AND OLD.ended_at IS NULL)
    EXECUTE FUNCTION leases_fence_ended();
ALTER TABLE leases_hold ENABLE ALWAYS TRIGGER fence_end_wakes_continuations;
