-- Controllers, and the leases that nobody holds any more. Conventions as in 0002_rules.sql.

-- 1. Since when this server has been there to be renewed at. A server that was restarted, recovered from a crash or was
--    promoted starts its WAL writer when it begins to take writes; who may not see that process (it takes
--    pg_read_all_stats) has the start of the postmaster, which a crash of one session does not move.
CREATE FUNCTION leases_up_since() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT greatest(pg_postmaster_start_time(),
                    (SELECT max(backend_start) FROM pg_stat_activity WHERE backend_type = 'walwriter'));
$$;

-- 2. One row watches the holds of the whole fleet. It is due no later than the first of them ends, and looks then. So a
--    hold that is taken, or shortened, moves it earlier if need be; it counts as a wake in any case, so that a look that
--    is under way, and did not see it, looks again. A plain renewal moves a hold later: no trigger, no notification; the
--    look finds the newer time. The renewal of a hold that had run out is told of in a few seconds, as a fleet comes back
--    together: what a person was asked about may be over by itself. So is the end of a run whose hold had run out.
--    What a person is asked about stays asked: a hold that is taken meanwhile wakes it only where it merely waits.
CREATE FUNCTION leases_hold_needs_watch(p_due timestamptz, p_heals boolean) RETURNS void LANGUAGE sql AS $$
    INSERT INTO leases_installation (id, "only", mark) VALUES (gen_random_uuid(), true, gen_random_uuid())
        ON CONFLICT ("only") DO NOTHING;
    INSERT INTO leases_obligation AS o
        (installation_id, kind, due_at, owed_since, verb, held_verb, wakes, requests, requests_served, failures,
         busy_count, last_error_kind, quiet, closed_as)
    SELECT i.id, 'watch_controllers', p_due, p_due, '', '', 0, 0, 0, 0, 0, '', '', '' FROM leases_installation i
        ON CONFLICT (installation_id, kind) WHERE closed_at IS NULL AND installation_id IS NOT NULL DO UPDATE
       SET wakes = o.wakes + 1,
           due_at = CASE WHEN o.attempt_id IS NOT NULL OR (o.quiet NOT IN ('', 'waiting') AND NOT p_heals) THEN o.due_at
                         ELSE least(coalesce(o.due_at, 'infinity'), EXCLUDED.due_at) END,
           -- When it was to be looked at, so that the look knows how late it is.
           owed_since = CASE WHEN o.attempt_id IS NOT NULL OR (o.quiet NOT IN ('', 'waiting') AND NOT p_heals)
                             THEN o.owed_since
                             WHEN o.due_at IS NULL THEN EXCLUDED.due_at
                             ELSE least(o.owed_since, EXCLUDED.due_at) END,
           quiet = CASE WHEN o.attempt_id IS NOT NULL OR (o.quiet NOT IN ('', 'waiting') AND NOT p_heals) THEN o.quiet
                        ELSE '' END;
$$;

CREATE FUNCTION leases_hold_taken() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_hold_needs_watch(NEW.controller_expires_at, false);
    RETURN NULL;
END $$;
CREATE TRIGGER run_made_held_wakes_watch AFTER INSERT ON leases_run
    FOR EACH ROW WHEN (NEW.controller_expires_at IS NOT NULL AND NEW.status IN ('queued', 'scheduled_retry', 'running'))
    EXECUTE FUNCTION leases_hold_taken();
CREATE TRIGGER run_held_wakes_watch AFTER UPDATE ON leases_run
    FOR EACH ROW WHEN (
        NEW.controller_expires_at IS NOT NULL AND NEW.status IN ('queued', 'scheduled_retry', 'running')
        AND (OLD.controller_expires_at IS NULL
             OR OLD.status NOT IN ('queued', 'scheduled_retry', 'running')
             OR NEW.controller_expires_at < OLD.controller_expires_at
             OR NEW.controller_seconds < OLD.controller_seconds)
    )
    EXECUTE FUNCTION leases_hold_taken();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_made_held_wakes_watch;
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_held_wakes_watch;

CREATE FUNCTION leases_lapse_healed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_hold_needs_watch(least(NEW.controller_expires_at, now() + interval '5 s'), true);
    RETURN NULL;
END $$;
CREATE TRIGGER run_lapse_healed_wakes_watch AFTER UPDATE ON leases_run
    FOR EACH ROW WHEN (
        OLD.status IN ('queued', 'scheduled_retry', 'running') AND OLD.controller_expires_at <= statement_timestamp()
        AND NEW.controller_expires_at > statement_timestamp()
    )
    EXECUTE FUNCTION leases_lapse_healed();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_lapse_healed_wakes_watch;

-- A run that ends by itself while a person is asked about its hold is one less to ask about.
CREATE FUNCTION leases_lapsed_run_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(o.id) FROM leases_obligation o
      WHERE o.kind = 'watch_controllers' AND o.closed_at IS NULL AND o.quiet NOT IN ('', 'waiting');
    RETURN NULL;
END $$;
CREATE TRIGGER run_lapsed_end_wakes_watch AFTER UPDATE ON leases_run
    FOR EACH ROW WHEN (
        OLD.status IN ('queued', 'scheduled_retry', 'running')
        AND NEW.status NOT IN ('queued', 'scheduled_retry', 'running')
        AND OLD.controller_expires_at <= statement_timestamp()
    )
    EXECUTE FUNCTION leases_lapsed_run_ended();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_lapsed_end_wakes_watch;

-- 3. A run that is over leaves what is still active of it to be settled. Whoever makes a lease active for a run holds the
--    run's lock (attach, resume, succeed): either it committed before this update had the row, and then the statement
--    below, whose snapshot is younger, sees the lease; or it comes after, and finds the run over. A settle that is open
--    already is woken by run_written_wakes_settles, which fires later.
CREATE FUNCTION leases_owe_settle(p_lease uuid, p_company uuid) RETURNS void LANGUAGE sql AS $$
    INSERT INTO leases_obligation
        (company_id, kind, lease_id, due_at, owed_since, verb, held_verb, wakes, requests, requests_served, failures,
         busy_count, last_error_kind, quiet, closed_as)
    VALUES (p_company, 'settle_orphan', p_lease, now(), now(), '', '', 0, 0, 0, 0, 0, '', '', '')
    ON CONFLICT (lease_id, kind) WHERE closed_at IS NULL AND lease_id IS NOT NULL DO NOTHING;
$$;

CREATE FUNCTION leases_run_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_owe_settle(abandoned.id, abandoned.company_id) FROM (
        SELECT l.id, l.company_id FROM leases_lease l WHERE l.run_id = NEW.id AND l.state = 'active' ORDER BY l.id
    ) abandoned;
    RETURN NULL;
END $$;
CREATE TRIGGER run_end_owes_settles AFTER UPDATE ON leases_run
    FOR EACH ROW WHEN (OLD.status IN ('queued', 'scheduled_retry', 'running')
                       AND NEW.status NOT IN ('queued', 'scheduled_retry', 'running'))
    EXECUTE FUNCTION leases_run_ended();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_end_owes_settles;

-- No code of ours makes a lease active that nobody holds; other hands may.
CREATE FUNCTION leases_lease_unheld() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.run_id IS NULL OR NOT EXISTS (
        SELECT 1 FROM leases_run r WHERE r.id = NEW.run_id AND r.status IN ('queued', 'scheduled_retry', 'running')
    ) THEN
        PERFORM leases_owe_settle(NEW.id, NEW.company_id);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER lease_made_unheld_owes_its_settle AFTER INSERT ON leases_lease
    FOR EACH ROW WHEN (NEW.state = 'active' AND NEW.ends_at IS NULL)
    EXECUTE FUNCTION leases_lease_unheld();
CREATE TRIGGER lease_unheld_owes_its_settle AFTER UPDATE ON leases_lease
    FOR EACH ROW WHEN (NEW.state = 'active' AND NEW.ends_at IS NULL
                       AND (OLD.state <> 'active' OR OLD.ends_at IS NOT NULL))
    EXECUTE FUNCTION leases_lease_unheld();
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_made_unheld_owes_its_settle;
ALTER TABLE leases_lease ENABLE ALWAYS TRIGGER lease_unheld_owes_its_settle;

-- 4. What a settle waits for besides holds: the run's startups, and that somebody took note of their end.
CREATE FUNCTION leases_startup_over() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_settles(NULL, NEW.run_id, NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER startup_end_wakes_orphans AFTER UPDATE ON leases_obligation
    FOR EACH ROW WHEN (NEW.kind = 'startup' AND OLD.closed_at IS NULL AND NEW.closed_at IS NOT NULL)
    EXECUTE FUNCTION leases_startup_over();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER startup_end_wakes_orphans;

CREATE FUNCTION leases_pending_over() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_settles(NULL, NEW.run_uuid, NULL);
    RETURN NULL;
END $$;
-- Named so that it fires behind operation_end_wakes_startup: a startup is locked before what waits for it, as at its end.
CREATE TRIGGER operation_over_wakes_orphans AFTER UPDATE ON leases_operation
    FOR EACH ROW WHEN (NEW.run_uuid IS NOT NULL AND OLD.state = 'pending' AND NEW.state <> 'pending')
    EXECUTE FUNCTION leases_pending_over();
ALTER TABLE leases_operation ENABLE ALWAYS TRIGGER operation_over_wakes_orphans;

CREATE FUNCTION leases_cancellation_acknowledged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_settles(NULL, NEW.id, NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER acknowledgement_wakes_orphans AFTER UPDATE ON leases_run
    FOR EACH ROW WHEN (NEW.cancel_acknowledged_at IS DISTINCT FROM OLD.cancel_acknowledged_at)
    EXECUTE FUNCTION leases_cancellation_acknowledged();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER acknowledgement_wakes_orphans;

-- 5. What nobody holds already, and who holds a run already.
SELECT leases_owe_settle(unheld.id, unheld.company_id) FROM (
    SELECT l.id, l.company_id FROM leases_lease l LEFT JOIN leases_run r ON r.id = l.run_id
     WHERE l.state = 'active' AND l.ends_at IS NULL
       AND (r.id IS NULL OR r.status NOT IN ('queued', 'scheduled_retry', 'running'))
     ORDER BY l.id
) unheld;
SELECT leases_hold_needs_watch(min(r.controller_expires_at), false) FROM leases_run r
 WHERE r.controller_expires_at IS NOT NULL AND r.status IN ('queued', 'scheduled_retry', 'running')
HAVING count(*) > 0;
