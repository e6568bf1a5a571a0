"""What the adapters of vendor libraries share: probing, paging, draft trees, scale layouts. Imports no library."""
