-- Findings name rows of one company alone. Conventions as in 0002_rules.sql.
ALTER TABLE leases_inventoryfinding ADD CONSTRAINT finding_keeps_company_of_lease
    FOREIGN KEY (company_id, lease_id) REFERENCES leases_lease (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_inventoryfinding ADD CONSTRAINT finding_keeps_company_of_account
    FOREIGN KEY (company_id, account_id) REFERENCES leases_provideraccount (company_id, id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE leases_inventoryfinding ADD CONSTRAINT finding_keeps_company_of_obligation
    FOREIGN KEY (company_id, obligation_id) REFERENCES leases_obligation (company_id, id) DEFERRABLE INITIALLY DEFERRED;
