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
