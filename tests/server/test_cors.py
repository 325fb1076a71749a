PAGE = "https://page.example"


def preflight(server, origin=PAGE, method="DELETE", headers="authorization,content-type"):
    asked = {"access-control-request-method": method, "access-control-request-headers": headers, "origin": origin}
    return server.http.options("/v1/models", headers=asked)


def test_a_preflight_needs_no_key(serve):
    server = serve(api_keys=("k",), cors_origins=(PAGE,))
    answer = preflight(server)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert {"GET", "POST", "DELETE"} <= {*answer.headers["access-control-allow-methods"].replace(" ", "").split(",")}
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = preflight(server, "https://other.example")
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_pages_can_read_answers_and_errors(serve):
    server = serve(api_keys=("k",), cors_origins=(PAGE,))
    for key, status in (("k", 200), ("x", 401)):
        answer = server.http.get("/v1/models", headers={"origin": PAGE, "x-api-key": key})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = server.http.get("/v1/models", headers={"origin": "https://other.example", "x-api-key": "k"})
    assert "access-control-allow-origin" not in other.headers


def test_every_origin(serve):
    server = serve(cors_origins=("*",))
    assert preflight(server).headers["access-control-allow-origin"] == "*"
    assert server.http.get("/version", headers={"origin": PAGE}).headers["access-control-allow-origin"] == "*"


def test_pages_from_outside_may_reach_this_machine_where_they_may_at_all(serve):
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    server = serve(cors_origins=(PAGE,))
    answer = server.http.options("/tokenize", headers={**asked, "origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-private-network"]) == (200, "true")
    assert server.http.options("/tokenize", headers={**asked, "origin": "https://other.example"}).status_code == 400


def test_no_origin_unless_it_was_given(serve):
    server = serve()
    assert preflight(server).status_code == 403
    assert "access-control-allow-origin" not in server.http.get("/version", headers={"origin": PAGE}).headers
