-- The proof of an end that was never proven is owed, as an obligation of its own kind. Conventions as in 0002_rules.sql.

-- 1. A lease that ended has its receipt, or owes the search for it: whoever ended it (an operator, an import, an older
--    version). And only what ended owes that: a sandbox that is found alive owes its teardown instead.
CREATE OR REPLACE FUNCTION leases_assert_lease(p_lease uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE l leases_lease; owes boolean; sought boolean; proven boolean;
BEGIN
    SELECT * INTO l FROM leases_lease WHERE id = p_lease FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owes := EXISTS (SELECT 1 FROM leases_obligation o
                     WHERE o.lease_id = l.id AND o.kind = 'teardown' AND o.closed_at IS NULL);
    IF (l.state = 'pending_cleanup') <> owes THEN
        RAISE EXCEPTION 'lease % is % but its teardown is %', l.id, l.state, CASE WHEN owes THEN 'open' ELSE 'not open' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_is_pending_exactly_while_teardown_is_open';
    END IF;
    sought := EXISTS (SELECT 1 FROM leases_obligation o
                       WHERE o.lease_id = l.id AND o.kind = 'verify_end' AND o.closed_at IS NULL);
    IF sought AND l.state NOT IN ('expired', 'failed') THEN
        RAISE EXCEPTION 'lease % is %: it has not ended, so nothing is to be verified', l.id, l.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'history_is_of_an_ended_lease';
    END IF;
    IF l.state IN ('released', 'retained', 'expired', 'failed') THEN
        proven := EXISTS (SELECT 1 FROM leases_receipt r
                           WHERE r.lease_id = l.id AND r.epoch = l.epoch
                             AND (l.state IN ('released', 'retained') OR l.successor_id IS NOT NULL
                                  OR r.evidence IN ('destroyed', 'absent')));
        -- Given up by name, or never owed here. What was closed in another way has no business without a receipt.
        sought := sought AND NOT EXISTS (
            SELECT 1 FROM leases_obligation t
             WHERE t.lease_id = l.id AND t.kind = 'teardown' AND t.closed_as <> 'unverified'
               AND t.id = (SELECT max(u.id) FROM leases_obligation u WHERE u.lease_id = l.id AND u.kind = 'teardown'));
        -- What is another installation's by now is no debt of ours (0013_watermark): nothing of it is owed or sought.
        sought := sought OR coalesce('disowned' = (
            SELECT t.closed_as FROM leases_obligation t
             WHERE t.lease_id = l.id AND t.kind IN ('teardown', 'verify_end') ORDER BY t.id DESC LIMIT 1), false);
        IF NOT proven AND NOT sought THEN
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

CREATE FUNCTION leases_history_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_lease(NEW.lease_id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER history_opened_at_commit AFTER INSERT ON leases_obligation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.kind = 'verify_end')
    EXECUTE FUNCTION leases_history_at_commit();
CREATE CONSTRAINT TRIGGER history_closed_at_commit AFTER UPDATE ON leases_obligation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.kind = 'verify_end' AND OLD.closed_at IS DISTINCT FROM NEW.closed_at)
    EXECUTE FUNCTION leases_history_at_commit();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER history_opened_at_commit;
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER history_closed_at_commit;

-- 2. A receipt that comes late pays the debt: its row is woken, and need not wait for the time of its next look where the
--    receipt is what it looks for, since it is closed then without a call.
CREATE FUNCTION leases_receipt_of_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE leases_obligation o SET not_before = NULL
      FROM leases_lease l
     WHERE l.id = o.lease_id AND o.lease_id = NEW.lease_id AND o.kind = 'verify_end' AND o.closed_at IS NULL
       AND NEW.epoch = l.epoch AND (NEW.evidence <> 'stopped' OR o.verb <> 'delete');
    PERFORM leases_wake(o.id) FROM leases_obligation o
      WHERE o.lease_id = NEW.lease_id AND o.kind = 'verify_end' AND o.closed_at IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER receipt_wakes_history AFTER INSERT ON leases_receipt
    FOR EACH ROW EXECUTE FUNCTION leases_receipt_of_history();
ALTER TABLE leases_receipt ENABLE ALWAYS TRIGGER receipt_wakes_history;

-- 3. What ended without a receipt until now owes it from today on. Last, because its checks are deferred.
INSERT INTO leases_obligation
    (company_id, kind, account_id, lease_id, due_at, not_before, owed_since, verb, held_verb, wakes, requests,
     requests_served, failures, busy_count, last_error_kind, quiet, closed_as)
SELECT l.company_id, 'verify_end', l.account_id, l.id, now() + interval '5 min', now() + interval '5 min', now(),
       coalesce((SELECT coalesce(nullif(t.held_verb, ''), t.verb) FROM leases_obligation t
                  WHERE t.lease_id = l.id AND t.kind = 'teardown' ORDER BY t.id DESC LIMIT 1), 'delete'),
       '', 0, 0, 0, 0, 0, '', '', ''
  FROM leases_lease l
 WHERE l.state IN ('expired', 'failed')
   AND NOT EXISTS (SELECT 1 FROM leases_receipt r
                    WHERE r.lease_id = l.id AND r.epoch = l.epoch
                      AND (l.successor_id IS NOT NULL OR r.evidence IN ('destroyed', 'absent')))
   AND NOT EXISTS (SELECT 1 FROM leases_obligation t
                    WHERE t.lease_id = l.id AND t.kind = 'teardown' AND t.closed_as = 'disowned'
                      AND t.id = (SELECT max(u.id) FROM leases_obligation u
                                   WHERE u.lease_id = l.id AND u.kind = 'teardown'))
 ORDER BY l.id;
