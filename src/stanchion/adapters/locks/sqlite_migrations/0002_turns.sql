-- Those who wait for a lock, in order of arrival.

CREATE TABLE turns (
    name TEXT NOT NULL,
    token TEXT NOT NULL,
    number INTEGER NOT NULL,        -- the lowest is first in line
    expires_at INTEGER NOT NULL,    -- of the ticket: in the past, the place is lost
    PRIMARY KEY (name, token)
) STRICT, WITHOUT ROWID;

CREATE INDEX turns_in_line ON turns (name, number);
CREATE INDEX turns_by_end ON turns (expires_at);
