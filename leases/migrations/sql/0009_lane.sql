-- The built-in lane has its row. Conventions as in 0002_rules.sql.

-- What names no account is claimed, and hinted at, under the lock of the installation's row. So that none is ever owed
-- without it, whoever writes, the first one makes it, as `Installation.current()` would.
CREATE FUNCTION leases_lane_exists() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM leases_installation) THEN
        INSERT INTO leases_installation (id, "only", mark) VALUES (gen_random_uuid(), true, gen_random_uuid())
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER obligation_of_lane_makes_it BEFORE INSERT ON leases_obligation
    FOR EACH ROW WHEN (NEW.account_id IS NULL)
    EXECUTE FUNCTION leases_lane_exists();
ALTER TABLE leases_obligation ENABLE ALWAYS TRIGGER obligation_of_lane_makes_it;

INSERT INTO leases_installation (id, "only", mark)
SELECT gen_random_uuid(), true, gen_random_uuid()
 WHERE EXISTS (SELECT 1 FROM leases_obligation WHERE account_id IS NULL)
    ON CONFLICT DO NOTHING;
