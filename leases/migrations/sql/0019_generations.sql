-- A controller's generation is a fence: one that was used is never given out again. Conventions as in 0002_rules.sql.
CREATE FUNCTION leases_run_is_monotone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the generation of the controller of run % cannot fall', OLD.id
        USING ERRCODE = 'check_violation', CONSTRAINT = 'run_generation_only_rises';
END $$;
CREATE TRIGGER run_is_monotone BEFORE UPDATE ON leases_run
    FOR EACH ROW WHEN (NEW.controller_generation < OLD.controller_generation)
    EXECUTE FUNCTION leases_run_is_monotone();
ALTER TABLE leases_run ENABLE ALWAYS TRIGGER run_is_monotone;
