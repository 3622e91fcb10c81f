-- History of recoveries, archives and continuations: who may remove it, and that nobody empties it. As in 0012_prune.sql.

CREATE OR REPLACE FUNCTION leases_grant_prune() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'paperclip_prune') THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO paperclip_prune', current_schema());
        GRANT SELECT, DELETE ON leases_attempt, leases_bridgeactivity, leases_hold, leases_inventoryfinding,
            leases_inventorylisting, leases_obligation, leases_receipt, leases_operation, leases_lease,
            leases_activityentry, leases_recovery, leases_archive, leases_continuation, leases_recoveryaction
            TO paperclip_prune;
    END IF;
END $$;
SELECT leases_grant_prune();

-- What a continuation was admitted by, and which file of the storage is whose, is said by these rows alone.
CREATE TRIGGER recovery_is_kept BEFORE DELETE ON leases_recovery FOR EACH ROW EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER archive_is_kept BEFORE DELETE ON leases_archive FOR EACH ROW EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER continuation_is_kept BEFORE DELETE ON leases_continuation FOR EACH ROW EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER recovery_is_not_emptied BEFORE TRUNCATE ON leases_recovery
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER archive_is_not_emptied BEFORE TRUNCATE ON leases_archive
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER continuation_is_not_emptied BEFORE TRUNCATE ON leases_continuation
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_is_kept;
ALTER TABLE leases_archive ENABLE ALWAYS TRIGGER archive_is_kept;
ALTER TABLE leases_continuation ENABLE ALWAYS TRIGGER continuation_is_kept;
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_is_not_emptied;
ALTER TABLE leases_archive ENABLE ALWAYS TRIGGER archive_is_not_emptied;
ALTER TABLE leases_continuation ENABLE ALWAYS TRIGGER continuation_is_not_emptied;

-- A closed recovery action that is removed as history opens no gate, and the role that removes it wakes nobody.
DROP TRIGGER recovery_action_wakes_continuations ON leases_recoveryaction;
CREATE TRIGGER recovery_action_wakes_continuations AFTER INSERT OR UPDATE ON leases_recoveryaction
    FOR EACH ROW EXECUTE FUNCTION leases_issue_told();
CREATE TRIGGER recovery_action_taken_back_wakes_continuations AFTER DELETE ON leases_recoveryaction
    FOR EACH ROW WHEN (OLD.closed_at IS NULL) EXECUTE FUNCTION leases_issue_told();
ALTER TABLE leases_recoveryaction ENABLE ALWAYS TRIGGER recovery_action_wakes_continuations;
ALTER TABLE leases_recoveryaction ENABLE ALWAYS TRIGGER recovery_action_taken_back_wakes_continuations;

-- A cancellation is owed until it is confirmed; or until nobody can confirm it any more: its sandboxes are the original's of
-- which this database is a clone (disowned), or its company was closed with all else settled (nothing_owed).
CREATE OR REPLACE FUNCTION leases_assert_cancellation(p_run uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE r leases_run; owed boolean; dropped boolean;
BEGIN
    SELECT * INTO r FROM leases_run WHERE id = p_run FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owed := EXISTS (SELECT 1 FROM leases_obligation o
                     WHERE o.run_id = r.id AND o.kind = 'confirm_cancel' AND o.closed_at IS NULL);
    dropped := EXISTS (SELECT 1 FROM leases_obligation o
                        WHERE o.run_id = r.id AND o.kind = 'confirm_cancel' AND o.closed_as IN ('disowned', 'nothing_owed'));
    IF (r.cancel_requested_at IS NOT NULL AND r.cancel_confirmed_at IS NULL AND NOT dropped) <> owed THEN
        RAISE EXCEPTION 'the cancellation of run % is %', r.id, CASE WHEN owed THEN 'not asked for, but owed' ELSE 'not owed' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'cancellation_is_owed_until_confirmed';
    END IF;
END $$;
