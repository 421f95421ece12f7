-- A small shop: the default database of the environment `sql`.
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price REAL NOT NULL);
CREATE TABLE orders (
  id INTEGER PRIMARY KEY,
  customer_id INTEGER NOT NULL REFERENCES customers(id),
  product_id INTEGER NOT NULL REFERENCES products(id),
  quantity INTEGER NOT NULL,
  day TEXT NOT NULL
);
INSERT INTO customers VALUES
  (1, 'Ada', 'London'), (2, 'Blaise', 'Paris'), (3, 'Carl', 'Berlin'), (4, 'Dora', 'Paris'),
  (5, 'Emmy', 'Berlin'), (6, 'Franz', 'Vienna');
INSERT INTO products VALUES
  (1, 'pen', 1.5), (2, 'notebook', 3.25), (3, 'lamp', 24.0), (4, 'chair', 89.9), (5, 'desk', 249.0);
INSERT INTO orders VALUES
  (1, 1, 1, 10, '2026-01-03'), (2, 1, 2, 4, '2026-01-03'), (3, 2, 5, 1, '2026-01-09'),
  (4, 3, 4, 2, '2026-01-15'), (5, 4, 1, 25, '2026-02-02'), (6, 4, 3, 1, '2026-02-02'),
  (7, 5, 2, 12, '2026-02-11'), (8, 5, 5, 2, '2026-02-20'), (9, 2, 3, 3, '2026-03-01');
