-- Recovery of files, continuation, and the end of a run. Conventions as in 0002_rules.sql.

-- 1. What must be true at commit. A generation runs exactly while somebody owes its attempts, and somebody its end; a
--    sandbox that may run although its end was proven is looked at for exactly so long; a continuation that waits is
--    looked at, and a cancellation that was asked for. Each check locks the row that it is about, so that two halves that
--    are written at once cannot both pass.
CREATE FUNCTION leases_assert_recovery(p_lease uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE l leases_lease; runs boolean;
BEGIN
    SELECT * INTO l FROM leases_lease WHERE id = p_lease FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    runs := EXISTS (SELECT 1 FROM leases_recovery r WHERE r.lease_id = l.id AND r.state = 'running');
    IF EXISTS (SELECT 1 FROM unnest(ARRAY['recover_workspace', 'end_recovery']) AS owed(kind)
                WHERE runs <> EXISTS (SELECT 1 FROM leases_obligation o
                                       WHERE o.lease_id = l.id AND o.kind = owed.kind AND o.closed_at IS NULL)) THEN
        RAISE EXCEPTION 'a recovery of lease % is %, but what it owes is not', l.id,
                        CASE WHEN runs THEN 'running' ELSE 'over' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'recovery_runs_exactly_while_it_is_owed';
    END IF;
END $$;

CREATE FUNCTION leases_assert_watched(p_lease uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE l leases_lease; watched boolean;
BEGIN
    SELECT * INTO l FROM leases_lease WHERE id = p_lease FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    watched := EXISTS (SELECT 1 FROM leases_obligation o
                        WHERE o.lease_id = l.id AND o.kind = 'watch_restart' AND o.closed_at IS NULL);
    IF (l.may_be_running_since IS NOT NULL) <> watched THEN
        RAISE EXCEPTION 'lease % % be running, but % it', l.id,
                        CASE WHEN watched THEN 'cannot' ELSE 'may' END, CASE WHEN watched THEN 'somebody watches' ELSE 'nobody watches' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'lease_may_run_exactly_while_it_is_watched';
    END IF;
END $$;

CREATE FUNCTION leases_assert_continuation(p_continuation uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE c leases_continuation; owed boolean;
BEGIN
    SELECT * INTO c FROM leases_continuation WHERE id = p_continuation FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owed := EXISTS (SELECT 1 FROM leases_obligation o WHERE o.continuation_id = c.id AND o.closed_at IS NULL);
    IF (c.state = 'waiting') <> owed THEN
        RAISE EXCEPTION 'continuation % is %, but its start is %', c.id, c.state, CASE WHEN owed THEN 'owed' ELSE 'not owed' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'continuation_waits_exactly_while_it_is_owed';
    END IF;
END $$;

CREATE FUNCTION leases_assert_cancellation(p_run uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE r leases_run; owed boolean;
BEGIN
    SELECT * INTO r FROM leases_run WHERE id = p_run FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    owed := EXISTS (SELECT 1 FROM leases_obligation o
                     WHERE o.run_id = r.id AND o.kind = 'confirm_cancel' AND o.closed_at IS NULL);
    IF (r.cancel_requested_at IS NOT NULL AND r.cancel_confirmed_at IS NULL) <> owed THEN
        RAISE EXCEPTION 'the cancellation of run % is %', r.id, CASE WHEN owed THEN 'not asked for, but owed' ELSE 'not owed' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'cancellation_is_owed_until_confirmed';
    END IF;
END $$;

CREATE FUNCTION leases_recovery_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_recovery(NEW.lease_id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER recovery_begun_at_commit AFTER INSERT ON leases_recovery
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION leases_recovery_at_commit();
CREATE CONSTRAINT TRIGGER recovery_ended_at_commit AFTER UPDATE ON leases_recovery
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.state <> NEW.state) EXECUTE FUNCTION leases_recovery_at_commit();
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_begun_at_commit;
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_ended_at_commit;

CREATE FUNCTION leases_watched_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_watched(NEW.id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER lease_watched_at_commit AFTER UPDATE ON leases_lease
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN ((OLD.may_be_running_since IS NULL) <> (NEW.may_be_running_since IS NULL))
    EXECUTE FUNCTION leases_watched_at_commit();
CREATE CONSTRAINT TRIGGER lease_made_watched_at_commit AFTER INSERT ON leases_lease
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.may_be_running_since IS NOT NULL)
    EXECUTE FUNCTION leases_watched_at_commit();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_watched_at_commit;
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_made_watched_at_commit;

CREATE FUNCTION leases_continuation_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_continuation(NEW.id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER continuation_begun_at_commit AFTER INSERT ON leases_continuation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION leases_continuation_at_commit();
CREATE CONSTRAINT TRIGGER continuation_ended_at_commit AFTER UPDATE ON leases_continuation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.state <> NEW.state)
    EXECUTE FUNCTION leases_continuation_at_commit();
ALTER TABLE leases_continuation ENABLE ALWAYS TRIGGER continuation_begun_at_commit;
ALTER TABLE leases_continuation ENABLE ALWAYS TRIGGER continuation_ended_at_commit;

CREATE FUNCTION leases_cancellation_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_assert_cancellation(NEW.id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER run_cancelled_at_commit AFTER UPDATE OF cancel_requested_at, cancel_confirmed_at ON leases_run
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (OLD.cancel_requested_at IS DISTINCT FROM NEW.cancel_requested_at
          OR OLD.cancel_confirmed_at IS DISTINCT FROM NEW.cancel_confirmed_at)
    EXECUTE FUNCTION leases_cancellation_at_commit();
CREATE CONSTRAINT TRIGGER run_made_cancelled_at_commit AFTER INSERT ON leases_run
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.cancel_requested_at IS NOT NULL)
    EXECUTE FUNCTION leases_cancellation_at_commit();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_cancelled_at_commit;
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_made_cancelled_at_commit;

CREATE FUNCTION leases_owed_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.kind IN ('recover_workspace', 'end_recovery') THEN PERFORM leases_assert_recovery(NEW.lease_id);
    ELSIF NEW.kind = 'watch_restart' THEN PERFORM leases_assert_watched(NEW.lease_id);
    ELSIF NEW.kind = 'start_continuation' THEN PERFORM leases_assert_continuation(NEW.continuation_id);
    ELSE PERFORM leases_assert_cancellation(NEW.run_id);
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER owed_opened_at_commit AFTER INSERT ON leases_obligation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.kind IN ('recover_workspace', 'end_recovery', 'watch_restart', 'start_continuation', 'confirm_cancel'))
    EXECUTE FUNCTION leases_owed_at_commit();
CREATE CONSTRAINT TRIGGER owed_closed_at_commit AFTER UPDATE ON leases_obligation
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.kind IN ('recover_workspace', 'end_recovery', 'watch_restart', 'start_continuation', 'confirm_cancel')
          AND OLD.closed_at IS DISTINCT FROM NEW.closed_at)
    EXECUTE FUNCTION leases_owed_at_commit();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER owed_opened_at_commit;
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER owed_closed_at_commit;

-- 2. What a row says for good.
CREATE FUNCTION leases_is_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% % already says otherwise', TG_TABLE_NAME, OLD.id
        USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME;
END $$;
CREATE TRIGGER recovery_facts_are_final BEFORE UPDATE ON leases_recovery
    FOR EACH ROW WHEN (
        OLD.state <> 'running'
        OR (OLD.company_id, OLD.lease_id, OLD.generation) IS DISTINCT FROM (NEW.company_id, NEW.lease_id, NEW.generation)
        OR NEW.attempts < OLD.attempts
        OR coalesce(NEW.restarted_epoch, 0) < coalesce(OLD.restarted_epoch, 0)
    )
    EXECUTE FUNCTION leases_is_final();
CREATE TRIGGER archive_facts_are_final BEFORE UPDATE ON leases_archive
    FOR EACH ROW WHEN (
        (OLD.company_id, OLD.lease_id, OLD.recovery_id, OLD.attempt_id, OLD.epoch, OLD.path, OLD.name)
            IS DISTINCT FROM (NEW.company_id, NEW.lease_id, NEW.recovery_id, NEW.attempt_id, NEW.epoch, NEW.path, NEW.name)
        OR OLD.saved_at IS NOT NULL AND (OLD.saved_at, OLD.size, OLD.sha256) IS DISTINCT FROM (NEW.saved_at, NEW.size, NEW.sha256)
        OR OLD.receipt_id IS NOT NULL AND NEW.receipt_id IS DISTINCT FROM OLD.receipt_id
        OR OLD.removed_at IS NOT NULL AND NEW.removed_at IS DISTINCT FROM OLD.removed_at
    )
    EXECUTE FUNCTION leases_is_final();
CREATE TRIGGER continuation_facts_are_final BEFORE UPDATE ON leases_continuation
    FOR EACH ROW WHEN (
        OLD.state <> 'waiting'
        OR (OLD.company_id, OLD.issue_id, OLD.run_id, OLD.kind, OLD.message_id)
            IS DISTINCT FROM (NEW.company_id, NEW.issue_id, NEW.run_id, NEW.kind, NEW.message_id)
        OR OLD.authored_at IS DISTINCT FROM NEW.authored_at
    )
    EXECUTE FUNCTION leases_is_final();
CREATE TRIGGER run_agent_is_final BEFORE UPDATE OF agent, adapter, continues_id ON leases_run
    FOR EACH ROW WHEN (
        OLD.agent <> '' AND NEW.agent <> OLD.agent OR OLD.adapter <> '' AND NEW.adapter <> OLD.adapter
        OR OLD.continues_id IS NOT NULL AND NEW.continues_id IS DISTINCT FROM OLD.continues_id
    )
    EXECUTE FUNCTION leases_is_final();
CREATE TRIGGER operation_recovery_is_final BEFORE UPDATE OF recovery_id ON leases_operation
    FOR EACH ROW WHEN (OLD.recovery_id IS DISTINCT FROM NEW.recovery_id) EXECUTE FUNCTION leases_is_final();
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_facts_are_final;
ALTER TABLE leases_archive ENABLE ALWAYS TRIGGER archive_facts_are_final;
ALTER TABLE leases_continuation ENABLE ALWAYS TRIGGER continuation_facts_are_final;
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_agent_is_final;
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_recovery_is_final;

-- An archive is offered with the proof that its sandbox ended after it was read: a receipt of the same lease, and of the
-- epoch in which it was read or a later one.
CREATE FUNCTION leases_archive_is_sealed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM leases_receipt r
                    WHERE r.id = NEW.receipt_id AND r.lease_id = NEW.lease_id AND r.epoch >= NEW.epoch) THEN
        RAISE EXCEPTION 'receipt % does not prove the end of what archive % was read from', NEW.receipt_id, NEW.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'archive_is_sealed_by_its_own_receipt';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER archive_is_sealed_by_its_own_receipt BEFORE INSERT OR UPDATE ON leases_archive
    FOR EACH ROW WHEN (NEW.receipt_id IS NOT NULL) EXECUTE FUNCTION leases_archive_is_sealed();
ALTER TABLE leases_archive ENABLE ALWAYS TRIGGER archive_is_sealed_by_its_own_receipt;

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
        OR OLD.continuation_id IS DISTINCT FROM NEW.continuation_id
        OR OLD.installation_id IS DISTINCT FROM NEW.installation_id
    )
    EXECUTE FUNCTION leases_obligation_is_bound();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_is_bound;

-- 3. What a recovery waits for: the end of a start of its sandbox, the state and the receipt of its lease. Likewise who
--    watches a sandbox that may run. Woken unconditionally; the settle evaluates. In the order of the rows.
CREATE FUNCTION leases_wake_recovery(p_lease uuid) RETURNS void LANGUAGE sql AS $$
    SELECT leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o
         WHERE o.lease_id = p_lease AND o.closed_at IS NULL
           AND o.kind IN ('recover_workspace', 'end_recovery', 'watch_restart')
         ORDER BY o.id
    ) waiting;
$$;

-- What waits for the end of a run: its cancellation, and the continuations of its issue.
CREATE FUNCTION leases_wake_continuations(p_issue uuid) RETURNS void LANGUAGE sql AS $$
    SELECT leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_continuation c JOIN leases_obligation o ON o.continuation_id = c.id
         WHERE c.issue_id = p_issue AND c.state = 'waiting' AND o.closed_at IS NULL
         ORDER BY o.id
    ) waiting;
$$;
CREATE FUNCTION leases_wake_end_of_run(p_run uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(o.id) FROM leases_obligation o
      WHERE o.run_id = p_run AND o.kind = 'confirm_cancel' AND o.closed_at IS NULL;
    PERFORM leases_wake_continuations(r.issue_id) FROM leases_run r WHERE r.id = p_run AND r.issue_id IS NOT NULL;
END $$;

CREATE FUNCTION leases_lease_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_recovery(NEW.id);
    PERFORM leases_wake_end_of_run(NEW.run_id);
    RETURN NULL;
END $$;
-- Fires behind lease_kept_no_more_owes_no_disposal and the like; of these rows none is locked by those.
CREATE TRIGGER lease_state_wakes_what_waits AFTER UPDATE ON leases_lease
    FOR EACH ROW WHEN (OLD.state <> NEW.state OR OLD.successor_id IS DISTINCT FROM NEW.successor_id)
    EXECUTE FUNCTION leases_lease_moved();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_state_wakes_what_waits;

CREATE FUNCTION leases_start_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.source_id IS NOT NULL THEN
        PERFORM leases_wake_recovery(NEW.source_id);
        PERFORM leases_wake_end_of_run(l.run_id) FROM leases_lease l
          WHERE l.id = NEW.source_id AND l.run_id IS DISTINCT FROM NEW.run_uuid;
    END IF;
    PERFORM leases_wake_end_of_run(NEW.run_uuid);
    RETURN NULL;
END $$;
CREATE TRIGGER operation_state_wakes_what_waits AFTER UPDATE ON leases_operation
    FOR EACH ROW WHEN (OLD.state <> NEW.state) EXECUTE FUNCTION leases_start_ended();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_state_wakes_what_waits;

CREATE FUNCTION leases_receipt_proves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_recovery(NEW.lease_id);
    PERFORM leases_wake_end_of_run(NEW.run_uuid);
    RETURN NULL;
END $$;
CREATE TRIGGER receipt_wakes_what_waits AFTER INSERT ON leases_receipt
    FOR EACH ROW EXECUTE FUNCTION leases_receipt_proves();
ALTER TABLE leases_receipt ENABLE ALWAYS TRIGGER receipt_wakes_what_waits;

CREATE FUNCTION leases_startup_came_to_its_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_end_of_run(NEW.run_id);
    RETURN NULL;
END $$;
CREATE TRIGGER startup_end_wakes_what_waits AFTER UPDATE ON leases_obligation
    FOR EACH ROW WHEN (NEW.kind = 'startup' AND OLD.closed_at IS NULL AND NEW.closed_at IS NOT NULL)
    EXECUTE FUNCTION leases_startup_came_to_its_end();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER startup_end_wakes_what_waits;

CREATE FUNCTION leases_run_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_end_of_run(NEW.id);
    IF OLD.issue_id IS DISTINCT FROM NEW.issue_id THEN PERFORM leases_wake_continuations(OLD.issue_id); END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER run_written_wakes_what_waits AFTER UPDATE OF status, finished_at, agent, adapter, issue_id ON leases_run
    FOR EACH ROW WHEN (
        OLD.status <> NEW.status OR OLD.finished_at IS DISTINCT FROM NEW.finished_at OR OLD.agent <> NEW.agent
        OR OLD.adapter <> NEW.adapter OR OLD.issue_id IS DISTINCT FROM NEW.issue_id
    )
    EXECUTE FUNCTION leases_run_moved();
CREATE FUNCTION leases_run_vanished() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_continuations(OLD.issue_id);
    RETURN NULL;
END $$;
CREATE TRIGGER run_deleted_wakes_what_waits AFTER DELETE ON leases_run
    FOR EACH ROW WHEN (OLD.issue_id IS NOT NULL) EXECUTE FUNCTION leases_run_vanished();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_written_wakes_what_waits;
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_deleted_wakes_what_waits;

-- A generation that begins or ends: what its continuations wait for, and what it held.
CREATE FUNCTION leases_recovery_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_settles(NEW.lease_id, NULL, NULL);
    PERFORM leases_wake_end_of_run(l.run_id) FROM leases_lease l WHERE l.id = NEW.lease_id;
    RETURN NULL;
END $$;
CREATE TRIGGER recovery_begun_wakes_what_waits AFTER INSERT ON leases_recovery
    FOR EACH ROW EXECUTE FUNCTION leases_recovery_moved();
CREATE TRIGGER recovery_ended_wakes_what_waits AFTER UPDATE ON leases_recovery
    FOR EACH ROW WHEN (OLD.state <> NEW.state) EXECUTE FUNCTION leases_recovery_moved();
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_begun_wakes_what_waits;
ALTER TABLE leases_recovery ENABLE ALWAYS TRIGGER recovery_ended_wakes_what_waits;

-- The facts that the control plane tells, and takes back.
CREATE FUNCTION leases_issue_told() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN PERFORM leases_wake_continuations(OLD.issue_id); END IF;
    IF TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND NEW.issue_id <> OLD.issue_id THEN
        PERFORM leases_wake_continuations(NEW.issue_id);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER issue_facts_wake_continuations AFTER INSERT OR UPDATE OR DELETE ON leases_issuefacts
    FOR EACH ROW EXECUTE FUNCTION leases_issue_told();
CREATE TRIGGER recovery_action_wakes_continuations AFTER INSERT OR UPDATE OR DELETE ON leases_recoveryaction
    FOR EACH ROW EXECUTE FUNCTION leases_issue_told();
CREATE FUNCTION leases_run_told() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_continuations(r.issue_id) FROM leases_run r
      WHERE r.id = CASE WHEN TG_OP = 'DELETE' THEN OLD.run_id ELSE NEW.run_id END AND r.issue_id IS NOT NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER run_facts_wake_continuations AFTER INSERT OR UPDATE OR DELETE ON leases_runfacts
    FOR EACH ROW EXECUTE FUNCTION leases_run_told();
ALTER TABLE leases_issuefacts ENABLE ALWAYS TRIGGER issue_facts_wake_continuations;
ALTER TABLE leases_recoveryaction ENABLE ALWAYS TRIGGER recovery_action_wakes_continuations;
ALTER TABLE leases_runfacts ENABLE ALWAYS TRIGGER run_facts_wake_continuations;

-- Another attempt at the lease is over.
DROP TRIGGER attempt_end_wakes_settles ON leases_obligation;
CREATE TRIGGER attempt_end_wakes_settles AFTER UPDATE ON leases_obligation
    FOR EACH ROW WHEN (OLD.attempt_id IS NOT NULL AND NEW.attempt_id IS NULL
                       AND NEW.kind IN ('extend', 'end_fence', 'verify_end', 'watch_restart'))
    EXECUTE FUNCTION leases_attempt_let_go();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER attempt_end_wakes_settles;

-- 4. No reference crosses a company.
ALTER TABLE leases_recovery ADD CONSTRAINT recovery_of_company UNIQUE (company_id, id);
ALTER TABLE leases_continuation ADD CONSTRAINT continuation_of_company UNIQUE (company_id, id);
ALTER TABLE leases_recovery ADD CONSTRAINT recovery_keeps_company_of_lease
    FOREIGN KEY (company_id, lease_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_archive ADD CONSTRAINT archive_keeps_company_of_lease
    FOREIGN KEY (company_id, lease_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_archive ADD CONSTRAINT archive_keeps_company_of_recovery
    FOREIGN KEY (company_id, recovery_id) REFERENCES leases_recovery (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_continuation ADD CONSTRAINT continuation_keeps_company_of_issue
    FOREIGN KEY (company_id, issue_id) REFERENCES leases_issue (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_continuation ADD CONSTRAINT continuation_keeps_company_of_run
    FOREIGN KEY (company_id, run_id) REFERENCES leases_run (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_continuation ADD CONSTRAINT continuation_keeps_company_of_started_run
    FOREIGN KEY (company_id, started_run_id) REFERENCES leases_run (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_continuation ADD CONSTRAINT continuation_keeps_company_of_recovery
    FOREIGN KEY (company_id, recovery_id) REFERENCES leases_recovery (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_recoveryaction ADD CONSTRAINT recovery_action_keeps_company_of_issue
    FOREIGN KEY (company_id, issue_id) REFERENCES leases_issue (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_recoveryaction ADD CONSTRAINT recovery_action_keeps_company_of_run
    FOREIGN KEY (company_id, run_id) REFERENCES leases_run (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_obligation ADD CONSTRAINT obligation_keeps_company_of_continuation
    FOREIGN KEY (company_id, continuation_id) REFERENCES leases_continuation (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_operation ADD CONSTRAINT operation_keeps_company_of_recovery
    FOREIGN KEY (company_id, recovery_id) REFERENCES leases_recovery (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_run ADD CONSTRAINT run_keeps_company_of_continued
    FOREIGN KEY (company_id, continues_id) REFERENCES leases_run (company_id, id) DEFERRABLE INITIALLY DEFERRED;
