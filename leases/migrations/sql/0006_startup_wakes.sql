-- A startup waits for the end of its sandbox, whoever's lease says it. One that is used again belongs to an earlier run's
-- lease until the attach: its receipt, and the end of yet another run's start of it, are what a later run's startup waits
-- for. In the order of the rows, so that two that wake the same ones cannot deadlock. Conventions as in 0002_rules.sql.
CREATE FUNCTION leases_wake_startups(p_run uuid, p_lease uuid) RETURNS void LANGUAGE sql AS $$
    SELECT leases_wake(waiting.id) FROM (
        SELECT o.id FROM leases_obligation o
         WHERE o.kind = 'startup' AND o.closed_at IS NULL
           AND (o.run_id = p_run
                OR o.run_id IN (SELECT op.run_uuid FROM leases_operation op
                                 WHERE op.source_id = p_lease OR op.lease_id = p_lease))
         ORDER BY o.run_id, o.id
    ) waiting;
$$;

CREATE OR REPLACE FUNCTION leases_operation_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_startups(NEW.run_uuid, NEW.source_id);
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION leases_receipt_came() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM leases_wake_startups(NEW.run_uuid, NEW.lease_id);
    RETURN NULL;
END $$;
