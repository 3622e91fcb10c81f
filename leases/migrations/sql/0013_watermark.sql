-- A restored or copied database destroys nothing. Conventions as in 0002_rules.sql.

-- 1. The mark moves forward, and what a person decided about it is not undone.
CREATE FUNCTION leases_watermark_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the high-water mark would move backwards'
        USING ERRCODE = 'check_violation', CONSTRAINT = 'installation_watermark_moves_forward';
END $$;
CREATE TRIGGER watermark_moves_forward BEFORE UPDATE ON leases_installation
    FOR EACH ROW WHEN (
        NEW.watermark_generation < OLD.watermark_generation
        OR (NEW.watermark_generation = OLD.watermark_generation
            AND OLD.watermark_position IS NOT NULL
            AND coalesce(NEW.watermark_position, 0) < OLD.watermark_position)
    )
    EXECUTE FUNCTION leases_watermark_moved();
ALTER TABLE leases_installation ENABLE ALWAYS TRIGGER watermark_moves_forward;

-- 2. Trust wakes what waited for it. A row that is about to become quiet shares this row's lock before it does
--    (`leases.trust`), so that it either is quiet when this looks, or sees that it is over.
CREATE FUNCTION leases_trusted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o
         WHERE o.quiet = 'observing' AND o.closed_at IS NULL
         ORDER BY o.lease_id, o.id
    ) waiting;
    RETURN NULL;
END $$;
CREATE TRIGGER trust_wakes_what_observed AFTER UPDATE ON leases_installation
    FOR EACH ROW WHEN (OLD.observing_since IS NOT NULL AND NEW.observing_since IS NULL)
    EXECUTE FUNCTION leases_trusted();
ALTER TABLE leases_installation ENABLE ALWAYS TRIGGER trust_wakes_what_observed;

-- 3. What was leased by the database that this one is a clone of ends here without proof, and is no debt of ours.
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
                           WHERE o.lease_id = l.id AND o.kind = 'teardown' AND o.closed_as IN ('unverified', 'disowned')
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
