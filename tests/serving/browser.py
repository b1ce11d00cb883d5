"""Headless Chromium by chromedriver's own HTTP: as much of WebDriver as the tests of the page need."""

import http.client
import json
import re
import shutil
import subprocess
from pathlib import Path


def programs():
    """Where chromedriver and Chromium are; None where one of them is not."""
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return (driver, chromium) if driver and chromium else None


class Browser:
    """One window of headless Chromium."""

    def __init__(self, profile: Path):
        driver, chromium = programs()
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        port = next(
            int(found[1]) for line in self._driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        disabled = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
        quiet = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in disabled)]
        options = {"binary": chromium, "args": [*quiet, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def close(self):
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=600)
            self._driver.stdout.close()
            self._http.close()

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body)
        self._http.request(method, self._session + path, data, {"Content-Type": "application/json"})
        answer = json.loads(self._http.getresponse().read())["value"]
        if isinstance(answer, dict) and "error" in answer and "stacktrace" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message'].splitlines()[0]}")
        return answer

    def cdp(self, command, **parameters):
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screen(self, width, height, scheme="light"):
        """So large, and light or dark."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def js(self, script, *arguments):
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, condition):
        """Until an expression is true in the page; its value. Raises RuntimeError after twenty seconds."""
        script = """const done = arguments[arguments.length - 1], until = performance.now() + 20000;
        const look = () => { let found = null; try { found = (%s); } catch {}
          if (found || performance.now() > until) done(found); else setTimeout(look, 50); }; look();"""
        found = self._call("POST", "/execute/async", {"script": script % condition, "args": []})
        if not found:
            raise RuntimeError(f"it never came: {condition}")
        return found

    def click(self, selector):
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(found.values()))}/click", {})

    def press(self, key):
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def complaints(self):
        """What the page has written to its console as errors or warnings since the last call."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [each["message"] for each in entries if each["level"] in ("SEVERE", "WARNING")]
