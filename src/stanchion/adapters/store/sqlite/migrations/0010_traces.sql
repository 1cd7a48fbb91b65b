-- What the spans of a job need, as JSON: the traceparent of its run, and when it was dispatched.
-- NULL if the run is not traced.
ALTER TABLE jobs ADD COLUMN trace BLOB;
