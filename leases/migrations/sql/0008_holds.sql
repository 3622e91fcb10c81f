-- Kept sandboxes, and what holds them. Conventions as in 0002_rules.sql.

UPDATE leases_installation SET mark = id;

-- 1. Waking respects the spacing that a row asks for; only a person's request does not.
CREATE OR REPLACE FUNCTION leases_wake(p_obligation bigint, p_explicit boolean DEFAULT false) RETURNS void
LANGUAGE sql AS $$
    UPDATE leases_obligation
       SET wakes = wakes + 1,
           requests = requests + (CASE WHEN p_explicit THEN 1 ELSE 0 END),
           due_at = CASE WHEN attempt_id IS NOT NULL THEN due_at
                         WHEN p_explicit OR not_before IS NULL THEN least(coalesce(due_at, 'infinity'), now())
                         ELSE least(coalesce(due_at, 'infinity'), greatest(now(), not_before)) END,
           quiet = CASE WHEN attempt_id IS NULL THEN '' ELSE quiet END
     WHERE id = p_obligation AND closed_at IS NULL;
$$;

-- 2. No sandbox without an end: a lease that becomes kept owes its disposal, whoever makes it so. It is due when the
--    sandbox's time is over; a lease that names none is due at once, and its settle says who has to decide.
CREATE FUNCTION leases_lease_kept() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE v_due timestamptz;
BEGIN
    v_due := CASE WHEN NEW.orphaned_at IS NOT NULL THEN now() ELSE coalesce(NEW.kept_until, now()) END;
    INSERT INTO leases_obligation
        (company_id, kind, lease_id, due_at, owed_since, verb, held_verb, wakes, requests, requests_served, failures,
         busy_count, last_error_kind, quiet, closed_as)
    VALUES (NEW.company_id, 'dispose', NEW.id, v_due, v_due, '', '', 0, 0, 0, 0, 0, '', '', '')
    ON CONFLICT (lease_id, kind) WHERE closed_at IS NULL AND lease_id IS NOT NULL DO NOTHING;
    RETURN NULL;
END $$;
CREATE TRIGGER lease_kept_owes_its_disposal AFTER UPDATE OF state ON leases_lease
    FOR EACH ROW WHEN (NEW.state IN ('released', 'retained') AND OLD.state NOT IN ('released', 'retained'))
    EXECUTE FUNCTION leases_lease_kept();
CREATE TRIGGER lease_made_kept_owes_its_disposal AFTER INSERT ON leases_lease
    FOR EACH ROW WHEN (NEW.state IN ('released', 'retained'))
    EXECUTE FUNCTION leases_lease_kept();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_kept_owes_its_disposal;
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_made_kept_owes_its_disposal;

-- It ends with that. Our own transitions close the row before, with the attempt that holds it; this is for other hands.
CREATE FUNCTION leases_lease_kept_no_more() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE leases_obligation
       SET closed_at = now(), closed_as = 'nothing_owed', due_at = NULL, quiet = '',
           attempt_id = NULL, worker = NULL, claimed_at = NULL
     WHERE lease_id = NEW.id AND kind = 'dispose' AND closed_at IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER lease_kept_no_more_owes_no_disposal AFTER UPDATE OF state ON leases_lease
    FOR EACH ROW WHEN (OLD.state IN ('released', 'retained') AND NEW.state NOT IN ('released', 'retained'))
    EXECUTE FUNCTION leases_lease_kept_no_more();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_kept_no_more_owes_no_disposal;

-- And exactly while it is kept. The other rules are those of 0004_journal_rules.
CREATE OR REPLACE FUNCTION leases_lease_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_lease(NEW.id);
    PERFORM leases_assert_kept(NEW.id);
    RETURN NULL;
END $$;
CREATE FUNCTION leases_assert_kept(p_lease uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE l leases_lease; owes boolean;
BEGIN
    SELECT * INTO l FROM leases_lease WHERE id = p_lease FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owes := EXISTS (SELECT 1 FROM leases_obligation o
                     WHERE o.lease_id = l.id AND o.kind = 'dispose' AND o.closed_at IS NULL);
    IF (l.state IN ('released', 'retained')) <> owes THEN
        RAISE EXCEPTION 'lease % is % but its disposal is %', l.id, l.state, CASE WHEN owes THEN 'open' ELSE 'not open' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_is_kept_exactly_while_disposal_is_open';
    END IF;
END $$;
CREATE OR REPLACE FUNCTION leases_obligation_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.kind = 'teardown' THEN PERFORM leases_assert_lease(NEW.lease_id); END IF;
    IF NEW.kind = 'dispose' THEN PERFORM leases_assert_kept(NEW.lease_id); END IF;
    IF NEW.kind IN ('recover_creation', 'recover_start') THEN PERFORM leases_assert_operation(NEW.operation_id); END IF;
    RETURN NULL;
END $$;

-- 3. Every write that can end a hold wakes what waits for it, unconditionally: two holds that end at once must not hide
--    each other. The settle evaluates. In the order of the leases, so that two that wake the same ones cannot deadlock.
CREATE FUNCTION leases_wake_settles(p_lease uuid, p_run uuid, p_issue uuid) RETURNS void LANGUAGE sql AS $$
    SELECT leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o JOIN leases_lease l ON l.id = o.lease_id
         WHERE o.closed_at IS NULL AND o.kind IN ('dispose', 'settle_orphan')
           AND (l.id = p_lease OR l.run_id = p_run OR l.issue_id = p_issue)
         ORDER BY l.id, o.id
    ) waiting;
$$;

CREATE FUNCTION leases_hold_written() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN PERFORM leases_wake_settles(OLD.lease_id, NULL, OLD.issue_id); END IF;
    IF TG_OP = 'INSERT' THEN PERFORM leases_wake_settles(NEW.lease_id, NULL, NEW.issue_id); END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER hold_written_wakes_settles AFTER INSERT OR UPDATE OR DELETE ON leases_hold
    FOR EACH ROW EXECUTE FUNCTION leases_hold_written();
ALTER TABLE leases_hold ENABLE ALWAYS TRIGGER hold_written_wakes_settles;

CREATE FUNCTION leases_hold_is_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'hold % already says otherwise', OLD.id
        USING ERRCODE = 'check_violation', CONSTRAINT = 'hold_facts_are_final';
END $$;
CREATE TRIGGER hold_is_final BEFORE UPDATE ON leases_hold
    FOR EACH ROW WHEN (
        (OLD.company_id, OLD.kind, OLD.holder) IS DISTINCT FROM (NEW.company_id, NEW.kind, NEW.holder)
        OR OLD.lease_id IS DISTINCT FROM NEW.lease_id OR OLD.issue_id IS DISTINCT FROM NEW.issue_id
        OR OLD.ended_at IS NOT NULL
    )
    EXECUTE FUNCTION leases_hold_is_final();
ALTER TABLE leases_hold ENABLE ALWAYS TRIGGER hold_is_final;

CREATE FUNCTION leases_run_written() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_settles(NULL, OLD.id, OLD.issue_id);
    RETURN NULL;
END $$;
CREATE TRIGGER run_written_wakes_settles AFTER UPDATE ON leases_run
    FOR EACH ROW WHEN (OLD.status <> NEW.status OR OLD.issue_id IS DISTINCT FROM NEW.issue_id)
    EXECUTE FUNCTION leases_run_written();
CREATE TRIGGER run_deleted_wakes_settles AFTER DELETE ON leases_run
    FOR EACH ROW EXECUTE FUNCTION leases_run_written();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_written_wakes_settles;
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_deleted_wakes_settles;

CREATE FUNCTION leases_kept_written() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_settles(NEW.id, NULL, NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER lease_written_wakes_settles AFTER UPDATE ON leases_lease
    FOR EACH ROW WHEN (
        OLD.state = NEW.state
        AND (OLD.expires_at IS DISTINCT FROM NEW.expires_at OR OLD.orphaned_at IS DISTINCT FROM NEW.orphaned_at
             OR OLD.kept_until IS DISTINCT FROM NEW.kept_until OR OLD.issue_id IS DISTINCT FROM NEW.issue_id)
    )
    EXECUTE FUNCTION leases_kept_written();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_written_wakes_settles;

-- The end of another live lease on the same sandbox, as the provider knows it (two accounts may be one there).
CREATE FUNCTION leases_other_lease_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o JOIN leases_lease l ON l.id = o.lease_id
         WHERE o.closed_at IS NULL AND o.kind IN ('dispose', 'settle_orphan') AND l.id <> NEW.id
           AND l.resource_id = NEW.resource_id AND l.provider = NEW.provider
           AND l.account_identity = NEW.account_identity
         ORDER BY l.id, o.id
    ) waiting;
    RETURN NULL;
END $$;
CREATE TRIGGER lease_end_wakes_settles AFTER UPDATE ON leases_lease
    FOR EACH ROW WHEN (OLD.state IN ('active', 'pending_cleanup', 'retained')
                       AND NEW.state NOT IN ('active', 'pending_cleanup', 'retained'))
    EXECUTE FUNCTION leases_other_lease_ended();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_end_wakes_settles;

-- The end of a start that was pending.
CREATE FUNCTION leases_start_over() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o JOIN leases_lease l ON l.id = o.lease_id
         WHERE o.closed_at IS NULL AND o.kind IN ('dispose', 'settle_orphan')
           AND l.account_id = NEW.account_id AND l.resource_id = NEW.resource_id
         ORDER BY l.id, o.id
    ) waiting;
    RETURN NULL;
END $$;
CREATE TRIGGER start_end_wakes_settles AFTER UPDATE ON leases_operation
    FOR EACH ROW WHEN (NEW.kind = 'start' AND OLD.state = 'pending' AND NEW.state <> 'pending')
    EXECUTE FUNCTION leases_start_over();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER start_end_wakes_settles;

-- The end of another attempt at the lease.
CREATE FUNCTION leases_attempt_let_go() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_settles(NEW.lease_id, NULL, NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER attempt_end_wakes_settles AFTER UPDATE ON leases_obligation
    FOR EACH ROW WHEN (OLD.attempt_id IS NOT NULL AND NEW.attempt_id IS NULL
                       AND NEW.kind IN ('extend', 'end_fence', 'verify_end'))
    EXECUTE FUNCTION leases_attempt_let_go();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER attempt_end_wakes_settles;

-- 4. What a row says of itself cannot change, where some of it may be null now.
DROP TRIGGER obligation_is_bound ON leases_obligation;
CREATE TRIGGER obligation_is_bound BEFORE UPDATE ON leases_obligation
    FOR EACH ROW WHEN (
        OLD.kind <> NEW.kind
        OR OLD.company_id IS DISTINCT FROM NEW.company_id
        OR OLD.account_id IS DISTINCT FROM NEW.account_id
        OR OLD.lease_id IS DISTINCT FROM NEW.lease_id
        OR OLD.operation_id IS DISTINCT FROM NEW.operation_id
        OR OLD.probed_account_id IS DISTINCT FROM NEW.probed_account_id
        OR OLD.run_id IS DISTINCT FROM NEW.run_id
        OR OLD.installation_id IS DISTINCT FROM NEW.installation_id
    )
    EXECUTE FUNCTION leases_obligation_is_bound();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_is_bound;

-- 5. The built-in lane wakes the beat like an account, when its hint is taken back.
CREATE TRIGGER lane_opened_notifies AFTER UPDATE ON leases_installation
    FOR EACH ROW WHEN (coalesce(NEW.hinted_until, '-infinity') < coalesce(OLD.hinted_until, '-infinity'))
    EXECUTE FUNCTION leases_notify_account();
ALTER TABLE leases_installation ENABLE ALWAYS TRIGGER lane_opened_notifies;

-- 6. No reference crosses a company.
ALTER TABLE leases_hold ADD CONSTRAINT hold_keeps_company_of_lease
    FOREIGN KEY (company_id, lease_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_hold ADD CONSTRAINT hold_keeps_company_of_issue
    FOREIGN KEY (company_id, issue_id) REFERENCES leases_issue (company_id, id) DEFERRABLE INITIALLY DEFERRED;

-- 7. What is kept already has an end from today on. Last, because its checks are deferred.
UPDATE leases_lease SET kept_until = now() + CASE WHEN scope <> '' THEN reuse_idle_for ELSE retain_for END
 WHERE state IN ('released', 'retained');
INSERT INTO leases_obligation
    (company_id, kind, lease_id, due_at, owed_since, verb, held_verb, wakes, requests, requests_served, failures,
     busy_count, last_error_kind, quiet, closed_as)
SELECT company_id, 'dispose', id, kept_until, kept_until, '', '', 0, 0, 0, 0, 0, '', '', ''
  FROM leases_lease WHERE state IN ('released', 'retained');
