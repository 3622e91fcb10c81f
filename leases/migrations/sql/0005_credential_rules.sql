-- Rules of credentials and of closed companies: the write that ends what keeps a row quiet wakes it. As in 0002_rules.sql.

-- 1. A credential that is made, enabled, moved or seen to work with another value wakes what waits for it,
--    unconditionally; the next attempt evaluates. Whoever makes a row quiet for a credential's sake holds the company,
--    shared, and reads the credential again under it (`credentials.still`). This takes the same lock exclusively, so it
--    either is seen by them or sees their quiet row. The rows are woken in the order in which a Stop takes them.
--    A deletion may end a fact too, where another credential of the same reference stands in for the deleted one.
CREATE FUNCTION leases_credential_written() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE c leases_credential; waiting bigint;
BEGIN
    IF TG_OP = 'DELETE' THEN c := OLD; ELSE c := NEW; END IF;
    PERFORM 1 FROM leases_company WHERE id = c.company_id FOR NO KEY UPDATE;
    FOR waiting IN
        SELECT o.id FROM leases_obligation o
          LEFT JOIN leases_lease l ON l.id = o.lease_id
          LEFT JOIN leases_operation op ON op.id = o.operation_id
          LEFT JOIN leases_provideraccount a ON a.id = o.probed_account_id
         WHERE o.company_id = c.company_id AND o.closed_at IS NULL
           AND o.quiet IN ('credential_inactive', 'credential_missing', 'credential_changed')
           AND (c.id IN (l.credential_uuid, op.credential_uuid, a.credential_id)
                OR c.reference IN (l.credential_reference, op.credential_reference))
         ORDER BY o.lease_id NULLS LAST, o.operation_id NULLS LAST, o.id
    LOOP
        PERFORM leases_wake(waiting);
    END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER credential_made_wakes_who_waits AFTER INSERT ON leases_credential
    FOR EACH ROW EXECUTE FUNCTION leases_credential_written();
CREATE TRIGGER credential_written_wakes_who_waits AFTER UPDATE OF status, reference, digest ON leases_credential
    FOR EACH ROW EXECUTE FUNCTION leases_credential_written();
CREATE TRIGGER credential_deleted_wakes_who_waits AFTER DELETE ON leases_credential
    FOR EACH ROW EXECUTE FUNCTION leases_credential_written();
ALTER TABLE leases_credential ENABLE ALWAYS TRIGGER credential_made_wakes_who_waits;
ALTER TABLE leases_credential ENABLE ALWAYS TRIGGER credential_deleted_wakes_who_waits;
ALTER TABLE leases_credential ENABLE ALWAYS TRIGGER credential_written_wakes_who_waits;

-- The probe of an account asks with the account's credential of today, so another one wakes it, quiet or claimed. There
-- is at most one, and a new one is made only under the account's lock, which this write holds.
CREATE FUNCTION leases_account_credential_chosen() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(o.id) FROM leases_obligation o
      WHERE o.probed_account_id = NEW.id AND o.closed_at IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER account_credential_wakes_probe AFTER UPDATE OF credential_id ON leases_provideraccount
    FOR EACH ROW WHEN (OLD.credential_id IS DISTINCT FROM NEW.credential_id)
    EXECUTE FUNCTION leases_account_credential_chosen();
ALTER TABLE leases_provideraccount ENABLE ALWAYS TRIGGER account_credential_wakes_probe;

-- 2. A company that is opened again wakes what waits because it was closed. Its own row is the lock.
CREATE FUNCTION leases_company_reopened() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE waiting bigint;
BEGIN
    FOR waiting IN
        SELECT o.id FROM leases_obligation o
         WHERE o.company_id = NEW.id AND o.closed_at IS NULL AND o.quiet = 'company_closed'
         ORDER BY o.operation_id NULLS LAST, o.id
    LOOP
        PERFORM leases_wake(waiting);
    END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER company_reopened_wakes_who_waits AFTER UPDATE ON leases_company
    FOR EACH ROW WHEN (OLD.closed_at IS NOT NULL AND NEW.closed_at IS NULL)
    EXECUTE FUNCTION leases_company_reopened();
ALTER TABLE leases_company ENABLE ALWAYS TRIGGER company_reopened_wakes_who_waits;
