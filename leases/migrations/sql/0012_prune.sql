-- Who may remove history, and that nobody empties a table of it by accident. Conventions as in 0002_rules.sql.

-- 1. The role under which closed history is removed, and no other: `manage.py prune` sets it for a transaction. A
--    superuser is every role's member, so it is the current role that counts. Where this migration's own role may not
--    make roles, whoever may does what docs/deleting.md says.
DO $$
BEGIN
    BEGIN
        IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'paperclip_prune') THEN
            CREATE ROLE paperclip_prune NOLOGIN;
        END IF;
    EXCEPTION
        WHEN insufficient_privilege THEN
            RAISE NOTICE 'the role paperclip_prune could not be made: until it is, manage.py prune refuses';
        WHEN duplicate_object OR unique_violation THEN
            NULL;  -- another database of this server was migrated at the same time: a role is the whole server's
    END;
    -- Who makes a role may not take it by that alone. A superuser may take any.
    BEGIN
        IF EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'paperclip_prune')
           AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
            EXECUTE format('GRANT paperclip_prune TO %I', current_user);
        END IF;
    EXCEPTION
        WHEN insufficient_privilege THEN
            RAISE NOTICE 'the role paperclip_prune could not be granted to %: until it is, manage.py prune refuses', current_user;
        WHEN unique_violation THEN
            NULL;
    END;
END $$;

CREATE FUNCTION leases_grant_prune() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'paperclip_prune') THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO paperclip_prune', current_schema());
        GRANT SELECT, DELETE ON leases_attempt, leases_bridgeactivity, leases_hold, leases_inventoryfinding,
            leases_inventorylisting, leases_obligation, leases_receipt, leases_operation, leases_lease,
            leases_activityentry TO paperclip_prune;
    END IF;
END $$;
SELECT leases_grant_prune();

CREATE OR REPLACE FUNCTION leases_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_user = 'paperclip_prune' THEN RETURN OLD; END IF;
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME;
END $$;

-- 2. Emptying a table at once fires no row's trigger, so it is refused by itself, whoever asks.
CREATE TRIGGER receipt_is_not_emptied BEFORE TRUNCATE ON leases_receipt
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER activityentry_is_not_emptied BEFORE TRUNCATE ON leases_activityentry
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER attempt_is_not_emptied BEFORE TRUNCATE ON leases_attempt
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER operation_is_not_emptied BEFORE TRUNCATE ON leases_operation
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER lease_is_not_emptied BEFORE TRUNCATE ON leases_lease
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
CREATE TRIGGER obligation_is_not_emptied BEFORE TRUNCATE ON leases_obligation
    FOR EACH STATEMENT EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_receipt ENABLE ALWAYS TRIGGER receipt_is_not_emptied;
ALTER TABLE leases_activityentry ENABLE ALWAYS TRIGGER activityentry_is_not_emptied;
ALTER TABLE leases_attempt ENABLE ALWAYS TRIGGER attempt_is_not_emptied;
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_is_not_emptied;
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_is_not_emptied;
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_is_not_emptied;
