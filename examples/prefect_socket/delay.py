"""Have a worker somewhere count, the way of Prefect: ``python delay.py``. Any server of Prefect will do."""

from tasks import count

if __name__ == "__main__":
    future = count.delay("total", times=3)
    future.wait(timeout=60)
    print(future.state.name)
