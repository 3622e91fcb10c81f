-- Rules of the journal of starts, of startups, and of leases that take a sandbox over. Conventions as in 0002_rules.sql.

-- 1. Monotone facts.
CREATE OR REPLACE FUNCTION leases_lease_is_monotone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.epoch < OLD.epoch OR coalesce(NEW.started_as_of, '-infinity') < coalesce(OLD.started_as_of, '-infinity') THEN
        RAISE EXCEPTION 'the epoch of lease % cannot fall', OLD.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_epoch_only_rises';
    END IF;
    IF (NEW.company_id, NEW.account_id, NEW.resource_id, NEW.account_identity)
       IS DISTINCT FROM (OLD.company_id, OLD.account_id, OLD.resource_id, OLD.account_identity)
       OR NEW.run_id IS DISTINCT FROM OLD.run_id
       OR (OLD.successor_id IS NOT NULL AND NEW.successor_id IS DISTINCT FROM OLD.successor_id)
    THEN
        RAISE EXCEPTION 'the bindings of lease % cannot change', OLD.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_bindings_are_final';
    END IF;
    RETURN NEW;
END $$;

-- What an operator ended unverified may still turn up: then it is attached to an owner for its teardown. The key of a
-- request is given up where another operation takes the request over, and never written anew.
CREATE OR REPLACE FUNCTION leases_operation_is_monotone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.resource_id <> '' AND NEW.resource_id <> OLD.resource_id)
       OR (OLD.lease_id IS NOT NULL AND NEW.lease_id IS DISTINCT FROM OLD.lease_id)
       OR NEW.name <> OLD.name
       OR NEW.account_identity <> OLD.account_identity
       OR NEW.lease_uuid <> OLD.lease_uuid
       OR NEW.run_uuid IS DISTINCT FROM OLD.run_uuid
       OR NEW.kind <> OLD.kind
       OR NEW.source_id IS DISTINCT FROM OLD.source_id
       OR NEW.request_key <> OLD.request_key OR (OLD.request_key IS NULL AND NEW.request_key IS NOT NULL)
       OR (OLD.state <> 'pending' AND NEW.state = 'pending')
       OR (NEW.company_id, NEW.account_id) IS DISTINCT FROM (OLD.company_id, OLD.account_id)
       OR (OLD.state = 'resolved' AND NEW.state <> 'resolved')
    THEN
        RAISE EXCEPTION 'operation % already says otherwise', OLD.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'operation_facts_are_final';
    END IF;
    RETURN NEW;
END $$;

DROP TRIGGER obligation_is_bound ON leases_obligation;
CREATE TRIGGER obligation_is_bound BEFORE UPDATE ON leases_obligation
    FOR EACH ROW WHEN (
        (OLD.kind, OLD.company_id, OLD.account_id) IS DISTINCT FROM (NEW.kind, NEW.company_id, NEW.account_id)
        OR OLD.lease_id IS DISTINCT FROM NEW.lease_id
        OR OLD.operation_id IS DISTINCT FROM NEW.operation_id
        OR OLD.probed_account_id IS DISTINCT FROM NEW.probed_account_id
        OR OLD.run_id IS DISTINCT FROM NEW.run_id
    )
    EXECUTE FUNCTION leases_obligation_is_bound();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_is_bound;

-- 2. What must be true at commit. A lease that was succeeded ended in its own epoch, though its sandbox lives on. While a
--    start is pending, no lease uses its sandbox or owes its teardown: who starts is alone with it. Both checks lock the
--    row that they are about, and a start locks its source lease first, so two halves cannot both pass.
CREATE OR REPLACE FUNCTION leases_assert_lease(p_lease uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE l leases_lease; owes boolean; proven boolean;
BEGIN
    SELECT * INTO l FROM leases_lease WHERE id = p_lease FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owes := EXISTS (SELECT 1 FROM leases_obligation o
                     WHERE o.lease_id = l.id AND o.kind = 'teardown' AND o.closed_at IS NULL);
    IF (l.state = 'pending_cleanup') <> owes THEN
        RAISE EXCEPTION 'lease % is % but its teardown is %', l.id, l.state, CASE WHEN owes THEN 'open' ELSE 'not open' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_is_pending_exactly_while_teardown_is_open';
    END IF;
    IF l.state IN ('released', 'retained', 'expired', 'failed') THEN
        proven := EXISTS (SELECT 1 FROM leases_receipt r
                           WHERE r.lease_id = l.id AND r.epoch = l.epoch
                             AND (l.state IN ('released', 'retained') OR l.successor_id IS NOT NULL
                                  OR r.evidence IN ('destroyed', 'absent')))
               OR EXISTS (SELECT 1 FROM leases_obligation o
                           WHERE o.lease_id = l.id AND o.kind = 'teardown' AND o.closed_as = 'unverified'
                             AND o.id = (SELECT max(t.id) FROM leases_obligation t
                                          WHERE t.lease_id = l.id AND t.kind = 'teardown'));
        IF NOT proven THEN
            RAISE EXCEPTION 'lease % cannot be % without a receipt of epoch %', l.id, l.state, l.epoch
                USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_settles_with_proof';
        END IF;
    ELSIF EXISTS (SELECT 1 FROM leases_operation op
                   WHERE op.account_id = l.account_id AND op.resource_id = l.resource_id
                     AND op.kind = 'start' AND op.state = 'pending') THEN
        RAISE EXCEPTION 'lease % is % while its sandbox is being started', l.id, l.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'start_is_alone_with_its_sandbox';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION leases_assert_operation(p_operation uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE op leases_operation; owned boolean;
BEGIN
    SELECT * INTO op FROM leases_operation WHERE id = p_operation FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owned := EXISTS (SELECT 1 FROM leases_obligation o
                      WHERE o.operation_id = op.id AND o.closed_at IS NULL
                        AND o.kind = CASE op.kind WHEN 'start' THEN 'recover_start' ELSE 'recover_creation' END);
    IF (op.state = 'pending') <> owned THEN
        RAISE EXCEPTION 'operation % is % but its recovery is %', op.id, op.state,
                        CASE WHEN owned THEN 'open' ELSE 'not open' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'operation_is_pending_exactly_while_recovery_is_open';
    END IF;
    IF op.kind = 'start' AND op.state = 'pending' AND EXISTS (
        SELECT 1 FROM leases_lease l
         WHERE l.account_id = op.account_id AND l.resource_id = op.resource_id
           AND l.state IN ('active', 'pending_cleanup')) THEN
        RAISE EXCEPTION 'operation % starts a sandbox that a lease uses', op.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'start_is_alone_with_its_sandbox';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION leases_obligation_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.kind = 'teardown' THEN PERFORM leases_assert_lease(NEW.lease_id); END IF;
    IF NEW.kind IN ('recover_creation', 'recover_start') THEN PERFORM leases_assert_operation(NEW.operation_id); END IF;
    RETURN NULL;
END $$;

-- 3. A startup is over when nothing of it is pending, running or unproven. Whatever may end the last of these wakes it,
--    unconditionally: two that end at once must not hide each other. Its settle evaluates.
CREATE FUNCTION leases_wake_startup(p_run uuid) RETURNS void LANGUAGE sql AS $$
    SELECT leases_wake(o.id) FROM leases_obligation o
     WHERE o.run_id = p_run AND o.kind = 'startup' AND o.closed_at IS NULL;
$$;

CREATE FUNCTION leases_operation_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_startup(NEW.run_uuid);
    RETURN NULL;
END $$;
CREATE TRIGGER operation_end_wakes_startup AFTER UPDATE ON leases_operation
    FOR EACH ROW WHEN (NEW.run_uuid IS NOT NULL AND OLD.state <> NEW.state)
    EXECUTE FUNCTION leases_operation_ended();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_end_wakes_startup;

CREATE FUNCTION leases_receipt_came() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_startup(NEW.run_uuid);
    RETURN NULL;
END $$;
CREATE TRIGGER receipt_wakes_startup AFTER INSERT ON leases_receipt
    FOR EACH ROW WHEN (NEW.run_uuid IS NOT NULL)
    EXECUTE FUNCTION leases_receipt_came();
ALTER TABLE leases_receipt ENABLE ALWAYS TRIGGER receipt_wakes_startup;

CREATE FUNCTION leases_startup_work_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_startup(op.run_uuid) FROM leases_operation op WHERE op.id = NEW.operation_id;
    RETURN NULL;
END $$;
CREATE TRIGGER startup_work_end_wakes_startup AFTER UPDATE ON leases_bridgeactivity
    FOR EACH ROW WHEN (NEW.operation_id IS NOT NULL AND OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL)
    EXECUTE FUNCTION leases_startup_work_ended();
ALTER TABLE leases_bridgeactivity ENABLE ALWAYS TRIGGER startup_work_end_wakes_startup;

-- 4. No reference crosses a company.
ALTER TABLE leases_operation ADD CONSTRAINT operation_keeps_company_of_source
    FOREIGN KEY (company_id, source_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_operation ADD CONSTRAINT operation_keeps_account_of_source
    FOREIGN KEY (account_id, source_id) REFERENCES leases_lease (account_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_lease ADD CONSTRAINT lease_keeps_company_of_successor
    FOREIGN KEY (company_id, successor_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_lease ADD CONSTRAINT lease_keeps_account_of_successor
    FOREIGN KEY (account_id, successor_id) REFERENCES leases_lease (account_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_bridgeactivity ADD CONSTRAINT activity_keeps_company_of_operation
    FOREIGN KEY (company_id, operation_id) REFERENCES leases_operation (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_keeps_company_of_run
    FOREIGN KEY (company_id, run_id) REFERENCES leases_run (company_id, id) DEFERRABLE INITIALLY DEFERRED;

-- 5. What was recorded before credentials were named by id.
UPDATE leases_lease l SET credential_uuid = c.id FROM leases_provideraccount a JOIN leases_credential c ON c.id = a.credential_id
 WHERE a.id = l.account_id AND l.credential_reference = c.reference;
UPDATE leases_operation o SET credential_uuid = c.id
  FROM leases_provideraccount a JOIN leases_credential c ON c.id = a.credential_id
 WHERE a.id = o.account_id AND o.credential_reference = c.reference;
