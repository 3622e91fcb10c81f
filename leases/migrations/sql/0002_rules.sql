-- Rules that hold whoever writes: triggers, and foreign keys that a company cannot cross.
-- Every trigger is ENABLE ALWAYS, so that a replica role or a restore does not switch it off.

-- 1. Waking. The one statement that wakes a row, for Python and for triggers alike (design 2.2): it always counts, and
--    makes the row due now only where no attempt holds it. A held row is made due by its own settle, which compares.
CREATE FUNCTION leases_wake(p_obligation bigint, p_explicit boolean DEFAULT false) RETURNS void
LANGUAGE sql AS $$
    UPDATE leases_obligation
       SET wakes = wakes + 1,
           requests = requests + (CASE WHEN p_explicit THEN 1 ELSE 0 END),
           due_at = CASE WHEN attempt_id IS NULL THEN least(coalesce(due_at, 'infinity'), now()) ELSE due_at END,
           quiet = CASE WHEN attempt_id IS NULL THEN '' ELSE quiet END
     WHERE id = p_obligation AND closed_at IS NULL;
$$;

-- 2. The end of work in a sandbox wakes its teardown, unconditionally: a trigger that looked whether this was the last
--    activity could not see another one that ends in a concurrent transaction. The settle evaluates.
CREATE FUNCTION leases_activity_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- A release that did not see this end holds the lease until its teardown is there to be woken.
    PERFORM 1 FROM leases_lease WHERE id = NEW.lease_id FOR SHARE;
    PERFORM leases_wake(o.id) FROM leases_obligation o
      WHERE o.lease_id = NEW.lease_id AND o.kind = 'teardown' AND o.closed_at IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER activity_end_wakes_teardown AFTER UPDATE ON leases_bridgeactivity
    FOR EACH ROW WHEN (OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL)
    EXECUTE FUNCTION leases_activity_ended();
ALTER TABLE leases_bridgeactivity ENABLE ALWAYS TRIGGER activity_end_wakes_teardown;

-- Late evidence wakes too: the id of a sandbox that its creation had not told of is work for its recovery, quiet or not.
CREATE FUNCTION leases_resource_learned() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(o.id) FROM leases_obligation o
      WHERE o.operation_id = NEW.id AND o.kind = 'recover_creation' AND o.closed_at IS NULL AND o.quiet <> '';
    RETURN NULL;
END $$;
CREATE TRIGGER resource_learned_wakes_recovery AFTER UPDATE ON leases_operation
    FOR EACH ROW WHEN (OLD.resource_id = '' AND NEW.resource_id <> '')
    EXECUTE FUNCTION leases_resource_learned();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER resource_learned_wakes_recovery;

-- 3. Notifying the beat: on commit, and only when a deadline is created or moves earlier (NULL is infinity), because a
--    notification serialises commits. The payload is the deadline in seconds since 1970; duplicates within one
--    transaction collapse. For accounts '0' says: read again.
CREATE FUNCTION leases_notify_deadline() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('paperclip_due', extract(epoch FROM NEW.due_at)::text);
    RETURN NULL;
END $$;
CREATE TRIGGER obligation_created_notifies AFTER INSERT ON leases_obligation
    FOR EACH ROW WHEN (NEW.due_at IS NOT NULL)
    EXECUTE FUNCTION leases_notify_deadline();
CREATE TRIGGER obligation_earlier_notifies AFTER UPDATE ON leases_obligation
    FOR EACH ROW WHEN (NEW.due_at IS NOT NULL AND (OLD.due_at IS NULL OR NEW.due_at < OLD.due_at))
    EXECUTE FUNCTION leases_notify_deadline();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_created_notifies;
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_earlier_notifies;

CREATE FUNCTION leases_notify_account() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('paperclip_due', '0');
    RETURN NULL;
END $$;
CREATE TRIGGER account_opened_notifies AFTER UPDATE ON leases_provideraccount
    FOR EACH ROW WHEN (
        coalesce(NEW.blocked_until, '-infinity') < coalesce(OLD.blocked_until, '-infinity')
        OR coalesce(NEW.hinted_until, '-infinity') < coalesce(OLD.hinted_until, '-infinity')
        OR NEW.concurrency_limit > OLD.concurrency_limit
        OR (OLD.circuit = 'open' AND NEW.circuit = 'closed')
    )
    EXECUTE FUNCTION leases_notify_account();
ALTER TABLE leases_provideraccount ENABLE ALWAYS TRIGGER account_opened_notifies;

-- 4. Append-only tables.
CREATE FUNCTION leases_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME;
END $$;
CREATE TRIGGER receipt_is_append_only BEFORE UPDATE OR DELETE ON leases_receipt
    FOR EACH ROW EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_receipt ENABLE ALWAYS TRIGGER receipt_is_append_only;
CREATE TRIGGER activityentry_is_append_only BEFORE UPDATE OR DELETE ON leases_activityentry
    FOR EACH ROW EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_activityentry ENABLE ALWAYS TRIGGER activityentry_is_append_only;
-- An attempt may be written until it is finished, and is never deleted; the journal and the leases are never deleted.
CREATE TRIGGER attempt_is_history BEFORE UPDATE ON leases_attempt
    FOR EACH ROW WHEN (OLD.finished_at IS NOT NULL) EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_attempt ENABLE ALWAYS TRIGGER attempt_is_history;
CREATE TRIGGER attempt_is_kept BEFORE DELETE ON leases_attempt
    FOR EACH ROW EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_attempt ENABLE ALWAYS TRIGGER attempt_is_kept;
CREATE TRIGGER operation_is_kept BEFORE DELETE ON leases_operation
    FOR EACH ROW EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_is_kept;
CREATE TRIGGER lease_is_kept BEFORE DELETE ON leases_lease
    FOR EACH ROW EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_is_kept;
CREATE TRIGGER obligation_is_kept BEFORE DELETE ON leases_obligation
    FOR EACH ROW EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_is_kept;
CREATE TRIGGER obligation_stays_closed BEFORE UPDATE ON leases_obligation
    FOR EACH ROW WHEN (OLD.closed_at IS NOT NULL) EXECUTE FUNCTION leases_append_only();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_stays_closed;

-- 5. A receipt matches its lease in every binding, and proves no epoch that has not begun.
CREATE FUNCTION leases_receipt_binds() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE l leases_lease;
BEGIN
    SELECT * INTO l FROM leases_lease WHERE id = NEW.lease_id;
    IF l.company_id IS DISTINCT FROM NEW.company_uuid
       OR l.run_id IS DISTINCT FROM NEW.run_uuid
       OR l.account_id IS DISTINCT FROM NEW.account_id
       OR l.account_identity IS DISTINCT FROM NEW.account_identity
       OR l.resource_id IS DISTINCT FROM NEW.resource_id
       OR NEW.epoch > l.epoch OR NEW.epoch < 1
    THEN
        RAISE EXCEPTION 'receipt does not bind to lease %', NEW.lease_id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'receipt_binds_to_its_lease';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER receipt_binds_to_its_lease BEFORE INSERT ON leases_receipt
    FOR EACH ROW EXECUTE FUNCTION leases_receipt_binds();
ALTER TABLE leases_receipt ENABLE ALWAYS TRIGGER receipt_binds_to_its_lease;

-- 6. Monotone facts: an epoch only rises, an id is written only where missing, a lease's bindings never change.
CREATE FUNCTION leases_lease_is_monotone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.epoch < OLD.epoch THEN
        RAISE EXCEPTION 'the epoch of lease % cannot fall', OLD.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_epoch_only_rises';
    END IF;
    IF (NEW.company_id, NEW.account_id, NEW.resource_id, NEW.account_identity)
       IS DISTINCT FROM (OLD.company_id, OLD.account_id, OLD.resource_id, OLD.account_identity)
       OR NEW.run_id IS DISTINCT FROM OLD.run_id
    THEN
        RAISE EXCEPTION 'the bindings of lease % cannot change', OLD.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_bindings_are_final';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER lease_is_monotone BEFORE UPDATE ON leases_lease
    FOR EACH ROW EXECUTE FUNCTION leases_lease_is_monotone();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_is_monotone;

CREATE FUNCTION leases_operation_is_monotone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.resource_id <> '' AND NEW.resource_id <> OLD.resource_id)
       OR (OLD.lease_id IS NOT NULL AND NEW.lease_id IS DISTINCT FROM OLD.lease_id)
       OR NEW.name <> OLD.name
       OR NEW.account_identity <> OLD.account_identity
       OR NEW.lease_uuid <> OLD.lease_uuid
       OR NEW.run_uuid IS DISTINCT FROM OLD.run_uuid
       OR (OLD.state = 'attached' AND NEW.state = 'pending')
       OR (NEW.company_id, NEW.account_id) IS DISTINCT FROM (OLD.company_id, OLD.account_id)
       OR (OLD.state = 'resolved' AND NEW.state <> 'resolved')
    THEN
        RAISE EXCEPTION 'operation % already says otherwise', OLD.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'operation_facts_are_final';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER operation_is_monotone BEFORE UPDATE ON leases_operation
    FOR EACH ROW EXECUTE FUNCTION leases_operation_is_monotone();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_is_monotone;

CREATE FUNCTION leases_obligation_is_bound() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the subject of obligation % cannot change', OLD.id
        USING ERRCODE = 'check_violation', CONSTRAINT = 'obligation_bindings_are_final';
END $$;
CREATE TRIGGER obligation_is_bound BEFORE UPDATE ON leases_obligation
    FOR EACH ROW WHEN (
        (OLD.kind, OLD.company_id, OLD.account_id) IS DISTINCT FROM (NEW.kind, NEW.company_id, NEW.account_id)
        OR OLD.lease_id IS DISTINCT FROM NEW.lease_id
        OR OLD.operation_id IS DISTINCT FROM NEW.operation_id
        OR OLD.probed_account_id IS DISTINCT FROM NEW.probed_account_id
    )
    EXECUTE FUNCTION leases_obligation_is_bound();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_is_bound;

-- A deadline is a time that comes: an infinite one would be owed and never tried.
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_is_due_at_a_time CHECK (isfinite(due_at));

-- 7. What must be true at commit. The check locks the lease (the operation), so that two transactions that each see half
--    of a change cannot both pass; our own code holds that lock already.
CREATE FUNCTION leases_assert_lease(p_lease uuid) RETURNS void LANGUAGE plpgsql AS $$
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
                             AND (l.state IN ('released', 'retained') OR r.evidence IN ('destroyed', 'absent')))
               OR EXISTS (SELECT 1 FROM leases_obligation o
                           WHERE o.lease_id = l.id AND o.kind = 'teardown' AND o.closed_as = 'unverified'
                             AND o.id = (SELECT max(t.id) FROM leases_obligation t
                                          WHERE t.lease_id = l.id AND t.kind = 'teardown'));
        IF NOT proven THEN
            RAISE EXCEPTION 'lease % cannot be % without a receipt of epoch %', l.id, l.state, l.epoch
                USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_settles_with_proof';
        END IF;
    END IF;
END $$;
CREATE FUNCTION leases_lease_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_lease(NEW.id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER lease_at_commit AFTER INSERT OR UPDATE ON leases_lease
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION leases_lease_at_commit();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_at_commit;

CREATE FUNCTION leases_assert_operation(p_operation uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE op leases_operation; owned boolean;
BEGIN
    SELECT * INTO op FROM leases_operation WHERE id = p_operation FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owned := EXISTS (SELECT 1 FROM leases_obligation o
                      WHERE o.operation_id = op.id AND o.kind = 'recover_creation' AND o.closed_at IS NULL);
    IF (op.state = 'pending') <> owned THEN
        RAISE EXCEPTION 'operation % is % but its recovery is %', op.id, op.state,
                        CASE WHEN owned THEN 'open' ELSE 'not open' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'operation_is_pending_exactly_while_recovery_is_open';
    END IF;
END $$;
CREATE FUNCTION leases_operation_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_operation(NEW.id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER operation_at_commit AFTER INSERT OR UPDATE ON leases_operation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION leases_operation_at_commit();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_at_commit;

CREATE FUNCTION leases_obligation_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.kind = 'teardown' THEN PERFORM leases_assert_lease(NEW.lease_id); END IF;
    IF NEW.kind = 'recover_creation' THEN PERFORM leases_assert_operation(NEW.operation_id); END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER obligation_created_at_commit AFTER INSERT ON leases_obligation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION leases_obligation_at_commit();
CREATE CONSTRAINT TRIGGER obligation_closed_at_commit AFTER UPDATE ON leases_obligation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.closed_at IS DISTINCT FROM NEW.closed_at)
    EXECUTE FUNCTION leases_obligation_at_commit();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_created_at_commit;
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_closed_at_commit;

-- 8. No reference crosses a company, and an obligation's account is its subject's.
ALTER TABLE leases_credential ADD CONSTRAINT credential_of_company UNIQUE (company_id, id);
ALTER TABLE leases_provideraccount ADD CONSTRAINT account_of_company UNIQUE (company_id, id);
ALTER TABLE leases_environment ADD CONSTRAINT environment_of_company UNIQUE (company_id, id);
ALTER TABLE leases_issue ADD CONSTRAINT issue_of_company UNIQUE (company_id, id);
ALTER TABLE leases_run ADD CONSTRAINT run_of_company UNIQUE (company_id, id);
ALTER TABLE leases_lease ADD CONSTRAINT lease_of_company UNIQUE (company_id, id);
ALTER TABLE leases_lease ADD CONSTRAINT lease_of_account UNIQUE (account_id, id);
ALTER TABLE leases_operation ADD CONSTRAINT operation_of_company UNIQUE (company_id, id);
ALTER TABLE leases_operation ADD CONSTRAINT operation_of_account UNIQUE (account_id, id);
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_of_company UNIQUE (company_id, id);

ALTER TABLE leases_provideraccount ADD CONSTRAINT account_keeps_company_of_credential
    FOREIGN KEY (company_id, credential_id) REFERENCES leases_credential (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_environment ADD CONSTRAINT environment_keeps_company_of_account
    FOREIGN KEY (company_id, account_id) REFERENCES leases_provideraccount (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_run ADD CONSTRAINT run_keeps_company_of_issue
    FOREIGN KEY (company_id, issue_id) REFERENCES leases_issue (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_lease ADD CONSTRAINT lease_keeps_company_of_environment
    FOREIGN KEY (company_id, environment_id) REFERENCES leases_environment (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_lease ADD CONSTRAINT lease_keeps_company_of_issue
    FOREIGN KEY (company_id, issue_id) REFERENCES leases_issue (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_lease ADD CONSTRAINT lease_keeps_company_of_run
    FOREIGN KEY (company_id, run_id) REFERENCES leases_run (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_lease ADD CONSTRAINT lease_keeps_company_of_account
    FOREIGN KEY (company_id, account_id) REFERENCES leases_provideraccount (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_bridgeactivity ADD CONSTRAINT activity_keeps_company_of_lease
    FOREIGN KEY (company_id, lease_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_operation ADD CONSTRAINT operation_keeps_company_of_account
    FOREIGN KEY (company_id, account_id) REFERENCES leases_provideraccount (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_operation ADD CONSTRAINT operation_keeps_company_of_lease
    FOREIGN KEY (company_id, lease_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_keeps_company_of_account
    FOREIGN KEY (company_id, account_id) REFERENCES leases_provideraccount (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_keeps_company_of_lease
    FOREIGN KEY (company_id, lease_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_keeps_company_of_operation
    FOREIGN KEY (company_id, operation_id) REFERENCES leases_operation (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_keeps_account_of_lease
    FOREIGN KEY (account_id, lease_id) REFERENCES leases_lease (account_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_keeps_account_of_operation
    FOREIGN KEY (account_id, operation_id) REFERENCES leases_operation (account_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_attempt ADD CONSTRAINT attempt_keeps_company_of_obligation
    FOREIGN KEY (company_id, obligation_id) REFERENCES leases_obligation (company_id, id) DEFERRABLE INITIALLY DEFERRED;
